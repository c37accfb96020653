"""Random faults for the soak: which worker does what wrong, and for how long."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.mock_cluster import MockWorker
from benchmarks.soak_cluster import SoakCluster

_POST_S = 5.0

# Of requests, posted to a worker: each ends by itself.
_POSTED: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("status 500", {"status": 500, "times": 3}),
    ("status 503", {"status": 503, "times": 5}),
    ("status 429", {"status": 429, "times": 5}),
    ("delay", {"delay": 1.0, "times": 5}),
    ("hang", {"hang": True, "times": 2}),
    ("cut", {"cut_after": 3, "times": 2}),
    ("stall", {"stall_after": 3, "times": 2}),
    ("refuse", {"refuse": 2.0}),
    ("no transfer parameters", {"wrong_prefill": "missing", "times": 3}),
    ("garbage for transfer parameters", {"wrong_prefill": "garbage", "times": 3}),
    ("transfer of blocks that are gone", {"wrong_prefill": "gone", "times": 3}),
    ("half of the KV events lost", {"drop_events": 0.5, "drop_replays": True}),
)
STOPPED_S = 4.0
DEAD_S = 2.0
STORE_AWAY_S = 3.0
CALM_S = 2.0
"""A fault that is posted counts as over so long after; then its worker is told to behave again."""


@dataclass(frozen=True, slots=True)
class _Fault:
    name: str
    run: Callable[[], Awaitable[None]]


class RandomFaults:
    """Makes things fail, one fault at a time in each role, so that somebody can always serve.

    Args:
        every: seconds from one fault to the next, on average.
    """

    def __init__(self, cluster: SoakCluster, chance: random.Random, every: float) -> None:
        self.done: Counter[str] = Counter()
        self._cluster = cluster
        self._chance = chance
        self._every = every
        self._busy: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        """Go on for so long, then wait until everything works again."""
        end = time.monotonic() + seconds
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_POST_S)) as session:
            while time.monotonic() < end:
                await asyncio.sleep(self._chance.expovariate(1 / self._every))
                worker = self._chance.choice(self._cluster.workers)
                is_store = self._chance.random() < 0.04
                place = "store" if is_store else worker.role
                if place in self._busy:
                    continue
                fault = self._of_store() if is_store else self._of_worker(session, worker)
                self.done[fault.name] += 1
                self._busy.add(place)
                task = asyncio.create_task(self._keep_busy(place, fault))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.gather(*self._tasks)

    async def _keep_busy(self, place: str, fault: _Fault) -> None:
        try:
            await fault.run()
        finally:
            self._busy.discard(place)

    def _of_store(self) -> _Fault:
        async def restart() -> None:
            self._cluster.store.kill()
            await asyncio.sleep(STORE_AWAY_S)
            await asyncio.to_thread(self._cluster.store.start)

        async def silence() -> None:
            self._cluster.store.pause()
            await asyncio.sleep(STORE_AWAY_S)
            self._cluster.store.resume()

        return self._chance.choice((_Fault("store killed", restart), _Fault("store stopped", silence)))

    def _of_worker(self, session: aiohttp.ClientSession, worker: MockWorker) -> _Fault:
        async def kill() -> None:
            await asyncio.to_thread(worker.process.kill)
            await asyncio.sleep(DEAD_S)
            await asyncio.to_thread(worker.start)

        async def leave() -> None:
            await asyncio.to_thread(worker.process.stop)
            await asyncio.to_thread(worker.start)

        async def stop() -> None:
            worker.signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            worker.signal(signal.SIGCONT)

        kind = self._chance.random()
        if kind < 0.1:
            return _Fault("worker killed", kill)
        if kind < 0.2:
            return _Fault("worker stopped", stop)
        if kind < 0.3:
            return _Fault("worker restarted", leave)
        name, faults = self._chance.choice(_POSTED)

        async def post() -> None:
            await self._tell(session, "POST", worker, faults)
            await asyncio.sleep(CALM_S + float(faults.get("refuse", 0.0)))
            await self._tell(session, "DELETE", worker, None)

        return _Fault(name, post)

    async def _tell(
        self, session: aiohttp.ClientSession, method: str, worker: MockWorker, faults: Mapping[str, Any] | None
    ) -> None:
        async with session.request(method, f"{worker.url}/mock/faults", json=faults) as answer:
            answer.raise_for_status()
