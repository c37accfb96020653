"""A store in this process's memory: for one-process set-ups, simulations and tests.

Everything that opens the same `MemoryStore` sees the same values, also from different threads and event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_pd.state.base import Epoch, PoolId, RouterWork, TokenizerFiles, WorkerId, WorkerLoad, WorkerRecord
from vllm_pd.state.block_index import Holder, Position, StreamEntry
from vllm_pd.state.demand import DemandReport
from vllm_pd.state.prefill_queue import Claimant, DeadJob, JobId, JobResult, PrefillJob
from vllm_pd.state.roles import WantedRole

_LONGEST_STREAM = 65_536

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")


@dataclass(slots=True)
class MemoryCache:
    """What one writer said it holds."""

    seq: int
    ends: float
    blocks: dict[bytes, int] = field(default_factory=dict)


class Waiters:
    """Who waits for something to happen in the store.

    Args:
        lock: the store's; `join`, `wake` and `len` are called with it held, `wait` without.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self) -> asyncio.Event:
        """Set at the next `wake`; for the running event loop, which then awaits `wait`."""
        event = asyncio.Event()
        self._waiting[event] = asyncio.get_running_loop()
        return event

    async def wait(self, event: asyncio.Event, wait_ms: float) -> None:
        """Return when it is set, or after `wait_ms`."""
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await event.wait()
        except TimeoutError:
            return
        finally:
            with self._lock:
                self._waiting.pop(event, None)

    def wake(self) -> None:
        for event, loop in self._waiting.items():
            # A loop that was closed waits for nothing.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)
        self._waiting = {}


class MemoryStream:
    """A bounded list of numbered entries, and who waits for the next. Call everything with the store's lock held.

    Args:
        last: numbers begin after this one.
        lock: the store's.
    """

    def __init__(self, last: int, lock: threading.Lock) -> None:
        self.entries: deque[StreamEntry] = deque(maxlen=_LONGEST_STREAM)
        self.last = last
        self.waiters = Waiters(lock)

    @property
    def first(self) -> int:
        """Number of the oldest entry that is still there."""
        return self.last - len(self.entries) + 1

    def append(self, make: Callable[[Position], StreamEntry]) -> None:
        self.last += 1
        self.entries.append(make(Position(f"{self.last}-0")))
        self.waiters.wake()


@dataclass(slots=True)
class MemoryJob:
    """A job of the prefill queue; times are ms of the store's clock."""

    job: PrefillJob
    entry: str
    put_ms: float
    ends: float
    came_ms: float = 0.0
    """When it came into the stream that it is in."""
    attempt: int = 0
    claimant: Claimant | None = None
    said_ms: float = 0.0
    """When its claimant last said something."""
    failed: WorkerId | None = None
    """Who tried it last."""


class MemoryQueue:
    """The prefill queue of a pool. Jobs are in order of arrival; `job.worker` says in which stream each is.

    Args:
        lock: the store's.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.jobs: dict[JobId, MemoryJob] = {}
        self.ended: dict[JobId, tuple[tuple[str, Claimant] | None, float]] = {}
        """Jobs that are over, with the claim (entry and claimant) that did each, if one did."""
        self.results: dict[str, list[tuple[tuple[JobId, JobResult], float]]] = {}
        """What each router has not seen yet."""
        self.routers: dict[str, float] = {}
        """Those that live."""
        self.cancelled: dict[Claimant, list[tuple[JobId, float]]] = {}
        """What each claimant has not seen yet."""
        self.dead: deque[DeadJob] = deque()
        self.entries = 0
        self.waiters = Waiters(lock)

    def drop_ended(self, now: float) -> None:
        self.jobs = {id: job for id, job in self.jobs.items() if job.ends > now}
        self.ended = {id: end for id, end in self.ended.items() if end[1] > now}
        self.routers = {router: ends for router, ends in self.routers.items() if ends > now}
        self.results = _fresh(self.results, now)
        self.cancelled = _fresh(self.cancelled, now)


def _fresh(lists: dict[_Key, list[tuple[_Item, float]]], now: float) -> dict[_Key, list[tuple[_Item, float]]]:
    kept = {key: [each for each in items if each[1] > now] for key, items in lists.items()}
    return {key: items for key, items in kept.items() if items}


@dataclass(slots=True)
class MemoryPlanner:
    """What planners of a pool keep; times are ms of the store's clock."""

    planner: str = ""
    term: int = 0
    ends: float = 0.0
    memory: tuple[bytes, float] | None = None
    newest: tuple[bytes, float] | None = None
    journal: deque[tuple[bytes, float]] = field(default_factory=deque)


@dataclass(slots=True)
class Namespace:
    """Values with the time (ms of the store's clock) at which each ends."""

    restarts: int
    lock: threading.Lock
    workers: dict[tuple[PoolId, WorkerId], tuple[WorkerRecord, float]] = field(default_factory=dict)
    loads: dict[tuple[PoolId, WorkerId], dict[int, tuple[dict[int, WorkerLoad], float]]] = field(default_factory=dict)
    inflight: dict[tuple[PoolId, str], tuple[dict[WorkerId, RouterWork], float]] = field(default_factory=dict)
    roles: dict[tuple[PoolId, WorkerId], tuple[WantedRole, float]] = field(default_factory=dict)
    demand: dict[tuple[PoolId, str], tuple[DemandReport, float]] = field(default_factory=dict)
    planners: dict[tuple[PoolId, bool], MemoryPlanner] = field(default_factory=dict)
    """By pool, and whether they only try out."""
    tokenizers: dict[tuple[PoolId, str], tuple[TokenizerFiles, float]] = field(default_factory=dict)
    caches: dict[tuple[PoolId, Holder, Epoch], MemoryCache] = field(default_factory=dict)
    events: dict[PoolId, MemoryStream] = field(default_factory=dict)
    queues: dict[PoolId, MemoryQueue] = field(default_factory=dict)

    def queue(self, pool: PoolId) -> MemoryQueue:
        return self.queues.setdefault(pool, MemoryQueue(self.lock))

    def stream(self, pool: PoolId) -> MemoryStream:
        """The pool's events. Numbers of an earlier life of the store are smaller, as a server's clock makes them."""
        return self.events.setdefault(pool, MemoryStream(self.restarts << 40, self.lock))

    def drop_ended(self, now: float) -> None:
        self.workers = {key: value for key, value in self.workers.items() if value[1] > now}
        self.inflight = {key: value for key, value in self.inflight.items() if value[1] > now}
        self.roles = {key: value for key, value in self.roles.items() if value[1] > now}
        self.demand = {key: value for key, value in self.demand.items() if value[1] > now}
        self.tokenizers = {key: value for key, value in self.tokenizers.items() if value[1] > now}
        self.caches = {key: cache for key, cache in self.caches.items() if cache.ends > now}
        for queue in self.queues.values():
            queue.drop_ended(now)
        fresh = {
            key: {writer: entry for writer, entry in entries.items() if entry[1] > now}
            for key, entries in self.loads.items()
        }
        self.loads = {key: entries for key, entries in fresh.items() if entries}


class MemoryStore:
    """What a Redis server is to the Redis implementations. Thread-safe.

    Args:
        clock: seconds, never going back; tests inject their own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._namespaces: dict[str, Namespace] = {}
        self._restarts = 0
        self.lock = threading.Lock()

    def now_ms(self) -> float:
        return self._clock() * 1000

    def namespace(self, name: str) -> Namespace:
        """Call with `lock` held; everything that has ended is already gone."""
        space = self._namespaces.setdefault(name, Namespace(self._restarts, self.lock))
        space.drop_ended(self.now_ms())
        return space

    def clear(self) -> None:
        """Forget everything, as a restart of the store would."""
        with self.lock:
            self._namespaces.clear()
            self._restarts += 1
