"""How many retries all requests together may have: a part of the requests of late, and a few in any case.

A worker that dies costs each of its requests one retry, which is what retries are for. A cluster that fails as a whole
must not be asked several times as often for it (Finagle's retry budgets have the same form). Both counts fade with the
same time constant, so a quiet time neither saves retries up without limit nor takes them away.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp

MEMORY_S = 60.0
"""Time constant: what is longer ago hardly counts."""


class RetryBudget:
    """Belongs to one router.

    Args:
        ratio: retries for each request of late.
        floor: retries that are allowed within `MEMORY_S` whatever the number of requests.
        clock: monotonic seconds.
    """

    __slots__ = ("_at", "_clock", "_floor", "_ratio", "_requests", "_retries")

    def __init__(self, ratio: float, floor: float, clock: Callable[[], float]) -> None:
        self._ratio = ratio
        self._floor = floor
        self._clock = clock
        self._requests = 0.0
        self._retries = 0.0
        self._at = clock()

    def note_request(self) -> None:
        """A request came."""
        self._fade()
        self._requests += 1

    def take(self) -> bool:
        """Whether one more retry is allowed now; if so it is counted."""
        self._fade()
        if self._retries + 1 > self._floor + self._ratio * self._requests:
            return False
        self._retries += 1
        return True

    def _fade(self) -> None:
        now = self._clock()
        # Below a second it makes no difference, and requests come faster than that.
        if now - self._at >= 1:
            kept = exp((self._at - now) / MEMORY_S)
            self._requests *= kept
            self._retries *= kept
            self._at = now
