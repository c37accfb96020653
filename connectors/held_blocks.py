"""Which finished requests a prefill worker keeps blocks for, and which of them may go now. Scheduler side, pure.

A router lets a hold go by its key (`vllm_pd.holds`). The release may come before the request has finished, or before it
has arrived at all: keys are remembered for a while, and such a request keeps nothing when it finishes.
"""

from __future__ import annotations

from collections.abc import Iterable

REMEMBER_S = 120.0
"""How long a key counts for requests that are still to come or to finish."""
MAX_REMEMBERED = 8192


class HeldBlocks:
    """Of one engine. Times are of the caller's monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}
        """Request id -> key, of every request that names one and is not done."""
        self._requests: dict[str, set[str]] = {}
        """Key -> those requests."""
        self._held: set[str] = set()
        self._released: dict[str, float] = {}
        """Key -> when it may be forgotten, oldest first."""
        self._leaving: list[str] = []

    def arrived(self, request_id: str, key: str) -> None:
        """A new prefill leg."""
        self._keys[request_id] = key
        self._requests.setdefault(key, set()).add(request_id)

    def release(self, keys: Iterable[str], now: float) -> None:
        """Nobody will read what is held under these keys. Unknown ones are remembered; twice is the same as once."""
        for key in keys:
            self._leaving += self._held & self._requests.get(key, set())
            self._released.pop(key, None)
            self._released[key] = now + REMEMBER_S
        while self._released and (len(self._released) > MAX_REMEMBERED or next(iter(self._released.values())) <= now):
            del self._released[next(iter(self._released))]

    def finished(self, request_id: str, kept: bool) -> None:
        """The request ended; `kept`: its blocks are kept for a reader."""
        key = self._keys.get(request_id)
        if key is None:
            return
        if not kept:
            self.gone([request_id])
            return
        self._held.add(request_id)
        if key in self._released:
            self._leaving.append(request_id)

    def gone(self, request_ids: Iterable[str]) -> None:
        """Nothing is kept for these any more."""
        for request_id in request_ids:
            key = self._keys.pop(request_id, None)
            if key is None:
                continue
            self._held.discard(request_id)
            others = self._requests[key]
            others.discard(request_id)
            if not others:
                del self._requests[key]

    def take_leaving(self) -> tuple[str, ...]:
        """Requests whose blocks are to be let go with the next step; each is given once."""
        leaving, self._leaving = tuple(dict.fromkeys(self._leaving)), []
        return leaving
