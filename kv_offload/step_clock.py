"""How long each step of the engine took, and how long it computed at all. Pure: the caller brings the time."""

from __future__ import annotations

from collections import deque

from vllm_pd.kv_offload.prefill_rate import StepWork

_MOST_UNDER_WAY = 64
"""Steps scheduled whose output has not come: more than any pipeline is deep."""


class StepClock:
    """Pairs each scheduled step with its output.

    With asynchronous scheduling the next step is scheduled while one runs, so a step begins when it is scheduled or
    when the one before it has ended, whichever is later. Time in which no step was under way is in none of them.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[StepWork, float]] = deque(maxlen=_MOST_UNDER_WAY)
        self._last_end = float("-inf")
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of all ended steps that computed something."""
        return self._busy_s

    def scheduled(self, work: StepWork, now: float) -> None:
        """A step was handed to the workers."""
        self._under_way.append((work, now))

    def ended(self, now: float) -> tuple[StepWork, float] | None:
        """The output of the oldest step came: its work and its seconds. None for a step that was never scheduled."""
        if not self._under_way:
            return None
        work, scheduled = self._under_way.popleft()
        seconds = max(0.0, now - max(scheduled, self._last_end))
        self._last_end = now
        if work.tokens or work.decoding:
            self._busy_s += seconds
        return work, seconds
