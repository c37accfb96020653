"""After a reset of the tiers, nothing comes from the SSD before the workers' copies from before the reset are over.

vLLM forgets its copies at a reset and gives all slots of host memory free. The workers learn of it with the next step,
and wait there for what still runs before they copy anything else. But a lookup of that next step already begins reads
from the SSD, in the scheduler's own process, into slots that a worker may still write to or read from: the block would
have the bytes of another one, or the request that is being loaded would.
"""

from __future__ import annotations


class ResetFence:
    """Closed from a reset until the output of the first step after it has come. Steps end in the order of schedule."""

    def __init__(self) -> None:
        self._scheduled = self._ended = self._closed_until = 0

    @property
    def closed(self) -> bool:
        """Whether lookups have to wait."""
        return self._ended < self._closed_until

    def reset(self) -> None:
        """vLLM has forgotten its copies, some of which were not over."""
        self._closed_until = self._scheduled + 1

    def step_scheduled(self) -> None:
        self._scheduled += 1

    def step_ended(self) -> None:
        self._ended += 1
