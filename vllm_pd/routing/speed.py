"""How fast a worker is, and what spares it work. It imports nothing of the cluster's state, whose reports hold it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """Leading blocks of a prompt that a cache holds, each counted on the fastest tier that has it.

    The run ends at the first block that no tier of the cache holds.
    """

    gpu: int = 0
    cpu: int = 0
    ssd: int = 0

    @property
    def blocks(self) -> int:
        return self.gpu + self.cpu + self.ssd


NO_OVERLAP = Overlap()


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a worker is. Priors at first, then learned from what it does.

    Prefilling `n` new tokens behind `c` cached ones takes `prefill_base + n * prefill_token + n * n / 2 *
    prefill_square + n * c * prefill_context` seconds, alone on the worker.
    """

    prefill_base: float = 0.0165
    prefill_token: float = 1.5e-5
    prefill_square: float = 8.4e-10
    prefill_context: float = 8.4e-10
    step_base: float = 0.006
    """One decode step with nothing running, and what each running sequence adds."""
    step_sequence: float = 2e-4
    cpu_block: float = 5e-5
    """Seconds to bring one block from host memory to the GPU, and from SSD."""
    ssd_block: float = 5e-4
    transfer_base: float = 0.005
    """Hand-over of a remote prefill: fixed part, and per block."""
    transfer_block: float = 5e-5

    def prefill(self, new: int, cached: int) -> float:
        """Seconds to compute `new` prompt tokens behind `cached` ones."""
        return (
            self.prefill_base
            + new * self.prefill_token
            + new * new * 0.5 * self.prefill_square
            + new * cached * self.prefill_context
        )

    def load(self, overlap: Overlap) -> float:
        """Seconds to bring to the GPU what is on slower tiers."""
        return overlap.cpu * self.cpu_block + overlap.ssd * self.ssd_block

    def transfer(self, blocks: int) -> float:
        """Seconds to hand over `blocks` that another worker computed."""
        return self.transfer_base + blocks * self.transfer_block
