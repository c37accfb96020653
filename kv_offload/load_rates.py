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
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise ValueError(f"A tier's latency must not be negative and its speed be above 0, got {self}.")

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
        self._speed = prior
        self._loads = 0

    @property
    def speed(self) -> LoadSpeed:
        return self._speed

    @property
    def loads(self) -> int:
        """How many were observed."""
        return self._loads

    def observe(self, size: int, seconds: float, queued: int = 0) -> None:
        """A load of `size` bytes that found `queued` bytes before it took `seconds`, its wait included.

        A load that was given up counts with the time that it was waited for. Sizes and times of 0 or less say nothing.
        """
        if size <= 0 or queued < 0 or seconds <= 0:
            return
        self._loads += 1
        fitted = self._law.observe((1.0, float(size + queued)), seconds)
        if fitted is not None:
            latency_s, per_byte = fitted
            # Where size is seen to make no difference.
            self._speed = LoadSpeed(latency_s, 1 / per_byte if per_byte > 0 else float("inf"))

    def predict_s(self, size: int, queued: int = 0) -> float:
        """Seconds from asking for `size` bytes, behind `queued` ones, until they are there."""
        return self._speed.predict_s(size, queued)
