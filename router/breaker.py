"""The circuit breaker of one worker: a pure state machine over what became of requests and of looks at its health.

- What the client has done wrong (4xx) says nothing about the worker. 429 and 503 are back-pressure: the worker is left
  out for as long as it asks, and its breaker never opens for them.
- A refused connection is certain: open at once. Answers that fail (5xx, broken off, too late) may be the request's own
  fault, so it takes several in a row.
- Open: not asked, but looked at (`router.health`), each time after a longer pause. What opened for connections or for
  silence closes with the first sign of life. A process that answers `/health` may still fail or compute nothing: what
  opened for that is tried with one request at a time (half-open) and closes with the first that succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from http import HTTPStatus

FAILURES_TO_OPEN = 3
"""Failed answers in a row."""
FAILURE_MEMORY_S = 30.0
"""A failed answer that long ago does not count any more."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
LONGEST_STUCK_PAUSE_S = 60.0
"""A request that tries an engine which computes nothing waits long in vain."""
TRIAL_S = 1.0
"""While half-open, one request is let through so often."""
BUSY_S = 1.0
"""How long a worker that is too busy is left out if it does not say."""
LONGEST_BUSY_S = 30.0
"""A worker that asks for more is asked again after this long."""


class Circuit(StrEnum):
    """Whether requests flow."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Trouble(StrEnum):
    """Why a breaker is not closed."""

    NONE = ""
    REFUSED = "takes no connections"
    DOWN = "gives no sign of life"
    STUCK = "computes nothing"
    FAILING = "fails"


class Sign(StrEnum):
    """What an answer's status says about the worker."""

    FINE = "fine"
    BUSY = "busy"
    FAILED = "failed"


_BUSY = (int(HTTPStatus.TOO_MANY_REQUESTS), int(HTTPStatus.SERVICE_UNAVAILABLE))


def sign_of(status: int) -> Sign:
    """What the status of an answer says about the worker that gave it."""
    if status in _BUSY:
        return Sign.BUSY
    return Sign.FAILED if status >= 500 else Sign.FINE


@dataclass(frozen=True, slots=True)
class Breaker:
    """State of one worker's breaker; every event returns the next one. Times are the caller's monotonic seconds."""

    circuit: Circuit = Circuit.CLOSED
    trouble: Trouble = Trouble.NONE
    cause: str = ""
    """Of the trouble, in the words of whoever saw it."""
    failures: int = 0
    failed_at: float = 0.0
    since: float = 0.0
    """When it opened for this trouble."""
    retry_at: float = 0.0
    """When an open one is looked at next."""
    pause: float = FIRST_PAUSE_S
    """The one after the next failure."""
    tried_at: float = 0.0
    """When a half-open one got its last request."""
    busy_until: float = 0.0

    def allows(self, now: float) -> bool:
        """Whether a request may go there now, as long as others could serve it too."""
        if now < self.busy_until or self.circuit is Circuit.OPEN:
            return False
        return self.circuit is Circuit.CLOSED or now >= self.tried_at + TRIAL_S

    def sent(self, now: float) -> Breaker:
        """A request goes there."""
        return replace(self, tried_at=now) if self.circuit is Circuit.HALF_OPEN else self

    def fine(self, now: float) -> Breaker:
        """It has answered a request. Others may be told all the same that it is too busy for them."""
        return CLOSED if now >= self.busy_until else Breaker(busy_until=self.busy_until)

    def busy(self, now: float, retry_after: float | None) -> Breaker:
        """It is too busy for a request, and asks for `retry_after` seconds; None if it does not say."""
        wait = BUSY_S if retry_after is None else min(max(retry_after, 0.0), LONGEST_BUSY_S)
        # Whoever says that is neither gone nor silent; whether it can answer is not known.
        base = CLOSED if self.trouble in (Trouble.REFUSED, Trouble.DOWN) else self
        return replace(base, busy_until=max(self.busy_until, now + wait))

    def failed(self, now: float, cause: str) -> Breaker:
        """It has failed a request that it had taken."""
        if self.circuit is Circuit.OPEN:
            return self
        recent = self.failures if now - self.failed_at < FAILURE_MEMORY_S else 0
        if self.circuit is Circuit.HALF_OPEN or recent + 1 >= FAILURES_TO_OPEN:
            return self._open(now, Trouble.FAILING, cause)
        return replace(self, failures=recent + 1, failed_at=now)

    def refused(self, now: float, cause: str) -> Breaker:
        """It took no connection. Requests that meet the same outage side by side count once."""
        if self.circuit is Circuit.OPEN and self.trouble is not Trouble.FAILING and now < self.retry_at:
            return self
        return self._open(now, Trouble.REFUSED, cause)

    def down(self, now: float, cause: str) -> Breaker:
        """It was found to give no sign of life."""
        if self.circuit is Circuit.OPEN and self.trouble is Trouble.DOWN and now < self.retry_at:
            return self
        return self._open(now, Trouble.DOWN, cause)

    def stuck(self, now: float, cause: str) -> Breaker:
        """Its engine has requests and was found to compute nothing."""
        if self.circuit is Circuit.OPEN:
            return self
        return self._open(now, Trouble.STUCK, cause)

    def alive(self) -> Breaker:
        """Its process has given a sign of life: it answers `/health`."""
        if self.circuit is not Circuit.OPEN:
            return self
        if self.trouble in (Trouble.FAILING, Trouble.STUCK):
            return replace(self, circuit=Circuit.HALF_OPEN, tried_at=0.0)
        return CLOSED

    def _open(self, now: float, trouble: Trouble, cause: str) -> Breaker:
        longest = LONGEST_STUCK_PAUSE_S if trouble is Trouble.STUCK else LONGEST_PAUSE_S
        pause = max(self.pause, LONGEST_PAUSE_S) if trouble is Trouble.STUCK else min(self.pause, longest)
        since = self.since if self.circuit is Circuit.OPEN and self.trouble is trouble else now
        return Breaker(Circuit.OPEN, trouble, cause, since=since, retry_at=now + pause, pause=min(longest, 2 * pause))


CLOSED = Breaker()
"""Of a worker without any trouble."""
