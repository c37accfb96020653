"""What a choice looks at. Times are seconds, lengths are tokens, blocks are whole KV blocks of the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from vllm_pd.state.base import PoolId, Role, WorkerId


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

    Prefilling `n` new tokens behind `c` cached ones takes `prefill_base + n * prefill_token +
    n * (c + n / 2) * prefill_square` seconds, alone on the worker.
    """

    prefill_base: float = 0.0165
    prefill_token: float = 1.5e-5
    prefill_square: float = 8.4e-10
    step_base: float = 0.006
    """One decode step with nothing running, and what each running sequence adds."""
    step_sequence: float = 2e-4
    cpu_block: float = 5e-5
    """Seconds to bring one block from host memory to the GPU, and from SSD."""
    ssd_block: float = 5e-4
    transfer_base: float = 0.005
    """Hand-over of a remote prefill: fixed part, and per block."""
    transfer_block: float = 5e-5


@dataclass(frozen=True, slots=True)
class Ask:
    """What is known of a request when it is placed."""

    tokens: int
    """Prompt length; an estimate where `exact` is false."""
    block_size: int
    output_tokens: int = 0
    """Expected length of the answer; 0 when nothing is known."""
    exact: bool = True
    """Whether overlap is known. If not, no worker is credited with any."""
    session: WorkerId | None = None
    """Where the request's session went last, by its affinity header."""
    arrived: float = 0.0


class Candidate(Protocol):
    """One engine that may take the request, as its router sees it now. Read only."""

    @property
    def id(self) -> WorkerId: ...
    @property
    def rank(self) -> int: ...
    @property
    def pool(self) -> PoolId: ...
    @property
    def role(self) -> Role: ...
    @property
    def prefill_queue(self) -> float:
        """Predicted seconds until prefill work that is already there is done."""

    @property
    def prefill_queue_tokens(self) -> int:
        """Uncached prompt tokens of requests that have no first token yet."""

    @property
    def running(self) -> int:
        """Requests being computed, by its own report corrected by what this router did since."""

    @property
    def waiting(self) -> int: ...
    @property
    def decoding(self) -> int:
        """Requests past their first token."""

    @property
    def active_blocks(self) -> int:
        """Blocks that requests in progress refer to."""

    @property
    def kv_blocks(self) -> int:
        """Capacity; 0 when unknown."""

    @property
    def kv_usage(self) -> float:
        """Fraction of blocks in use by running requests, as reported, 0 to 1."""

    @property
    def inflight(self) -> int:
        """This router's own requests on it."""

    @property
    def last_pick(self) -> int:
        """Grows with every pick; the smallest was picked longest ago."""

    @property
    def rates(self) -> Rates: ...


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate with what a policy thinks of it; everything that `explain` shows."""

    id: WorkerId
    rank: int
    overlap: Overlap
    uncached: int
    """Prompt tokens to compute there."""
    score: float
    """The policy's own unit; smaller is better, whatever the original formula does."""
    ttft: float = 0.0
    """Predicted seconds to the first token; 0 where the policy does not predict."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named terms of the score: `queue`, `prefill`, `load`, `transfer`, `disturbance`, ..."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome: indexes into the candidates given, in `scored` order."""

    chosen: int
    scored: tuple[Scored, ...]
    reason: str
    """Why, in a few words: `lowest`, `session`, `tie: picked longest ago`, `temperature`, `only one`."""
