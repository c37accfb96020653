"""Blocks that a mock worker keeps for other workers, by the names and rules of the real connector."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable

from vllm_pd.sim.work import Work

_EARLY = 1024
"""Keys that are remembered because they were let go before anything was held for them."""


class MockHolds:
    """Made and used in one loop.

    Args:
        release: gives a request's blocks back.
    """

    def __init__(self, release: Callable[[Work], None]) -> None:
        self._release = release
        self._held: dict[str, tuple[Work, str, asyncio.TimerHandle]] = {}
        self._by_key: dict[str, str] = {}
        self._early: dict[str, None] = {}

    def add(self, request_id: str, work: Work, key: str, seconds: float) -> str:
        """Keep the blocks for so long; returns the name they have now: a client may use a request's id twice."""
        name = f"{request_id}-{uuid.uuid4().hex[:8]}"
        timer = asyncio.get_running_loop().call_later(seconds, self.release, name)
        self._held[name] = work, key, timer
        if key in self._early:
            self.release(name)
        elif key:
            self._by_key[key] = name
        return name

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def release(self, name: str) -> None:
        """Another worker has them, or will not come. Idempotent."""
        held = self._held.pop(name, None)
        if held is None:
            return
        work, key, timer = held
        timer.cancel()
        self._by_key.pop(key, None)
        self._release(work)

    def let_go(self, keys: Iterable[str]) -> None:
        """The router will not use what is held under these keys, nor what will be."""
        for key in keys:
            if key in self._by_key:
                self.release(self._by_key[key])
            else:
                self._early[key] = None
        while len(self._early) > _EARLY:
            del self._early[next(iter(self._early))]

    def close(self) -> None:
        """Forget everything. Idempotent."""
        for _, _, timer in self._held.values():
            timer.cancel()
        self._held.clear()
        self._by_key.clear()
