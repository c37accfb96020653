"""Whether the engines of a worker get on: what decides if a job that takes long is still worked on."""

from __future__ import annotations

import time
from collections.abc import Callable

_WINDOW_S = 300.0
_LONGEST_S = 60.0
_FACTOR = 2.0


class EngineProgress:
    """Fed by vLLM's event loop at each report of an engine, read by the agent's thread.

    An engine reports after each step, so silence means a long step or a stopped engine. How long its steps take is
    learned: the second longest pause of the last minutes counts, so one stop does not pass for a slow engine.

    Args:
        known: whether every report of the engines reaches this process. With several API servers it does not, and
            then silence means nothing.
        clock: monotonic seconds.
    """

    def __init__(self, *, known: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._known = known
        self._clock = clock
        self._last = clock()
        self._busy = False
        self._window_ends = self._last + _WINDOW_S
        self._pauses = (0.0, 0.0)
        """The second longest and the longest in this window."""
        self._before = 0.0
        """The second longest of the window before."""

    @property
    def last(self) -> float:
        """When the newest report came, by the clock."""
        return self._last

    @property
    def now(self) -> float:
        """By the same clock."""
        return self._clock()

    def note(self, running: int) -> None:
        """An engine reported. Cheap: it is called at each step."""
        now = self._clock()
        if now > self._window_ends:
            self._before, self._pauses = self._pauses[0], (0.0, 0.0)
            self._window_ends = now + _WINDOW_S
        if self._busy:
            pause = now - self._last
            if pause > self._pauses[0]:
                self._pauses = (min(pause, self._pauses[1]), max(pause, self._pauses[1]))
        self._busy = running > 0
        self._last = now

    def stuck(self, since: float, at_least_s: float) -> bool:
        """Whether an engine that was given work at `since` has been silent for longer than its steps take.

        Args:
            at_least_s: silence of up to so many seconds is never too long.
        """
        if not self._known:
            return False
        patience = max(at_least_s, min(_LONGEST_S, _FACTOR * max(self._pauses[0], self._before)))
        return self._clock() - max(self._last, since) > patience
