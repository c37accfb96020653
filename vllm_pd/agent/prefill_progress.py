"""Whether the engines of a worker get on: what decides if a job that takes long is still worked on."""

from __future__ import annotations

import time
from collections.abc import Callable

_WINDOW_S = 300.0
_LONGEST_S = 60.0
_FACTOR = 2.0
_ENOUGH = 2
"""Pauses by which a window says how long steps take."""


class EngineProgress:
    """Fed by vLLM's event loop at each report of an engine, read by the agent's thread.

    An engine reports after each step, so silence means a long step or a stopped engine. How long its steps take is
    learned: the second longest pause of the last minutes counts, so one stop does not pass for a slow engine. One that
    has not shown enough of them yet has all the patience there is: its first steps are often its longest.

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
        self._seen = 0
        """Pauses in this window."""
        self._before: float | None = None
        """The second longest of the last window that had enough of them."""
        self._given = 0.0
        """When an idle engine got work, until it reports; 0 for none."""

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
            if self._seen >= _ENOUGH:
                self._before = self._pauses[0]
            self._pauses, self._seen = (0.0, 0.0), 0
            self._window_ends = now + _WINDOW_S
        since = self._last if self._busy else self._given
        if since:
            pause = now - since
            self._seen += 1
            if pause > self._pauses[0]:
                self._pauses = (min(pause, self._pauses[1]), max(pause, self._pauses[1]))
        self._busy = running > 0
        self._last, self._given = now, 0.0

    def give(self) -> None:
        """An engine is handed work: from now on it is to report."""
        if not self._busy and not self._given:
            self._given = self._clock()

    def stuck(self, since: float, at_least_s: float) -> bool:
        """Whether an engine that was given work at `since` has been silent for longer than its steps take.

        Args:
            at_least_s: silence of up to so many seconds is never too long.
        """
        if not self._known:
            return False
        patience = max(at_least_s, min(_LONGEST_S, _FACTOR * self._usual()))
        return self._clock() - max(self._last, since) > patience

    def _usual(self) -> float:
        """How long a pause may be, in seconds, as far as is known."""
        longest = self._pauses[0]
        if self._before is not None:
            return max(longest, self._before)
        return longest if self._seen >= _ENOUGH else _LONGEST_S
