"""Switches a tier off that keeps failing, and on again when it works. Pure.

A failed load costs a request its deadline, and a failed write costs nothing but noise; neither is worth asking for
again and again while a disk is gone. One state machine for each direction: a file system that became read-only still
serves what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

OUTCOMES = 8
"""The last so many are looked at,"""
FAILURES_TO_OPEN = 4
"""and if so many of them failed"""
WINDOW_S = 60.0
"""within this time, the tier is off."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
TRIAL_S = 60.0
"""A trial without an outcome by then counts as failed."""


@dataclass(frozen=True, slots=True)
class TierBreaker:
    """Every event returns the next state. Times are the caller's monotonic seconds.

    Attributes:
        recent: the last outcomes: when, and whether it went well.
        off_since: None while all is well.
        cause: of the failure that switched it off, in the words of whoever saw it.
        retry_at: when it may be tried next while it is off.
        pause: the one after the next failed trial.
    """

    recent: tuple[tuple[float, bool], ...] = ()
    off_since: float | None = None
    cause: str = ""
    retry_at: float = 0.0
    pause: float = FIRST_PAUSE_S

    @property
    def is_off(self) -> bool:
        return self.off_since is not None

    def is_due(self, now: float) -> bool:
        """It is off, and a trial is due."""
        return self.is_off and now >= self.retry_at

    def trying(self, now: float) -> TierBreaker:
        """A trial has begun: no other before its outcome."""
        return replace(self, retry_at=now + TRIAL_S)

    def fine(self, now: float) -> TierBreaker:
        """An operation, or the trial, went well."""
        if self.is_off:
            return TierBreaker()
        return replace(self, recent=self._with(now, True))

    def failed(self, now: float, cause: str) -> TierBreaker:
        """An operation, or the trial, failed."""
        if self.is_off:
            longer = min(self.pause * 2, LONGEST_PAUSE_S)
            return replace(self, cause=cause, retry_at=now + self.pause, pause=longer)
        recent = self._with(now, False)
        failures = sum(not fine for at, fine in recent if now - at <= WINDOW_S)
        if failures < FAILURES_TO_OPEN:
            return replace(self, recent=recent)
        return TierBreaker((), now, cause, now + FIRST_PAUSE_S, FIRST_PAUSE_S * 2)

    def _with(self, now: float, fine: bool) -> tuple[tuple[float, bool], ...]:
        return (*self.recent[-OUTCOMES + 1 :], (now, fine))


ON = TierBreaker()
