"""How fast a tier gives back blocks, learned from the loads that were made."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_pd.linear_law import LinearLaw

_REFIT_EVERY = 4
"""Loads between two fits: a tier that became slow is to be noticed within a few."""
_KEEP = 0.99
"""What a load still weighs after each later one: the last three hundred count at most."""


@dataclass(frozen=True, slots=True)
class LoadSpeed:
    """A load of `n` bytes behind `q` queued ones takes `latency_s + (n + q) / bytes_per_s` seconds."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s > 0 and self.bytes_per_s > 0):
            raise ValueError(f"A tier's latency and speed must be above 0, got {self}.")

    def predict_s(self, size: int, queued: int = 0) -> float:
        """Seconds for `size` bytes behind `queued` ones."""
        return self.latency_s + (size + queued) / self.bytes_per_s


CPU_PRIOR = LoadSpeed(latency_s=2e-4, bytes_per_s=8e9)
"""Host memory before the first load: PCIe 3 or one core's memcpy."""
SSD_PRIOR = LoadSpeed(latency_s=1e-3, bytes_per_s=1.5e9)
"""An NVMe drive of the plain kind before the first load."""


class LoadRate:
    """One tier's speed. Used by one thread.

    Args:
        prior: what is believed before the first load. Some loads leave it, a single one does not.
    """

    def __init__(self, prior: LoadSpeed) -> None:
        self._law = LinearLaw((prior.latency_s, 1 / prior.bytes_per_s), refit_every=_REFIT_EVERY, keep=_KEEP)
        self._latency_s, self._per_byte = prior.latency_s, 1 / prior.bytes_per_s
        self._loads = 0

    @property
    def loads(self) -> int:
        """How many were observed."""
        return self._loads

    @property
    def latency_s(self) -> float:
        return self._latency_s

    @property
    def bytes_per_s(self) -> float:
        """Infinite where size is seen to make no difference."""
        return 1 / self._per_byte if self._per_byte else float("inf")

    def observe(self, size: int, seconds: float, queued: int = 0) -> None:
        """A load of `size` bytes that found `queued` bytes before it took `seconds`, its wait included.

        A load that was given up counts with the time that it was waited for. Sizes and times of 0 or less say nothing.
        """
        if size <= 0 or queued < 0:
            return
        if seconds > 0:
            self._loads += 1
        fitted = self._law.observe((1.0, float(size + queued)), seconds)
        if fitted is not None:
            self._latency_s, self._per_byte = fitted

    def predict_s(self, size: int, queued: int = 0) -> float:
        """Seconds from asking for `size` bytes, behind `queued` ones, until they are there."""
        return self._latency_s + (size + queued) * self._per_byte
