"""The prefill queues of the pools that this router serves: whether they can be used, and what keeps them going.

In the background, for each pool with workers that claim: this router is announced, the results of its jobs are brought,
jobs of workers that left or give no sign of life are given to others, claims of workers that say nothing are given up,
and the depth is looked at. Every router does all of it; doing it twice changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from vllm_pd.background import end_tasks
from vllm_pd.errors import QueueFull, StoreError
from vllm_pd.router.directory import Directory
from vllm_pd.router.legs import transfer_params
from vllm_pd.router.queue_claimants import SUSPECT_S, Claimants
from vllm_pd.router.queue_results import Expected, JobResults
from vllm_pd.router.release import Hold, Releases
from vllm_pd.router.repeat import repeat
from vllm_pd.router.watched_legs import Legs
from vllm_pd.router.worker import Source, Worker
from vllm_pd.routing.queue_rule import Departure, departure
from vllm_pd.state.base import PoolId, WorkerId
from vllm_pd.state.prefill_payload import decode_answer
from vllm_pd.state.prefill_queue import JobResult, PrefillQueue, QueueDepth

INTERVAL_S = 0.5
ANNOUNCE_S = 1.0
ANNOUNCED_MS = 15_000
DEPTH_S = 1.0
RECLAIM_S = 2.0
SLOW_PUTS = 3
MOST_AT_ONCE = 64
"""Jobs that one call of `rehome` or `reclaim` moves at most."""
MOST_CALLS = 32
"""Of these in a row: a stream holds some thousand jobs at most."""
LOOKED_AT = 512
"""Jobs of the queue, the oldest ones, among which are those that have been claimed for long."""
CANCELS_AT_ONCE = 16
"""Each has a connection to the store meanwhile."""
LAST_CANCELS_S = 1.0
MOST_CANCELS = 4096
"""Waiting, while the store does not answer; jobs beyond end by their deadline."""
MOST_TOLD = 32
"""Workers that are told of a job that was lost. With more of them its blocks are left to their lease."""

_log = logging.getLogger(__name__)


class PoolQueue:
    """The queue of one pool as this router sees it now."""

    def __init__(self, pool: PoolId, jobs: JobResults, watched: Claimants) -> None:
        self.pool = pool
        self.jobs = jobs
        self.watched = watched
        self.up = False
        """The store has answered, and has failed at nothing since."""
        self.problem = ""
        """Of the last time."""
        self.models: frozenset[str] = frozenset()
        """Names that every worker who claims answers to."""
        self.claimers: frozenset[WorkerId] = frozenset()
        """Those that are well as far as is known."""
        self.asks_key = False
        """Some worker who claims wants an API key."""
        self.depths: Mapping[WorkerId | None, QueueDepth] = {}
        self.seen: dict[WorkerId, float] = {}
        """Registered workers, each with the end of its lease as last seen."""
        self.missing: dict[WorkerId, tuple[float, bool | None]] = {}
        """Since when workers with jobs are not registered, and what `departure` asks."""
        self.slow_puts = 0
        """In a row."""
        self.announced_at = self.depth_at = self.reclaimed_at = float("-inf")

    @property
    def waiting_tokens(self) -> int:
        """Of all its streams."""
        return sum(depth.waiting_tokens for depth in self.depths.values())

    def slow(self, problem: str) -> None:
        """The store took too long for a job. Once may be a busy machine."""
        self.slow_puts += 1
        if self.slow_puts >= SLOW_PUTS:
            self.failed(problem)

    def failed(self, problem: str) -> None:
        """The store did not do what it was asked for. Until it has answered again the queue is not used."""
        level = logging.WARNING if problem != self.problem else logging.DEBUG
        if self.up:
            _log.log(level, "the prefill queue cannot be used, work is sent directly: %s", problem)
        self.up, self.problem = False, problem


class QueueWatch:
    """Belongs to one router.

    Args:
        router: id under which this router's jobs are put.
        clock: monotonic seconds, the directory's.
    """

    def __init__(
        self,
        queue: PrefillQueue,
        directory: Directory,
        releases: Releases,
        legs: Legs,
        router: str,
        clock: Callable[[], float],
    ) -> None:
        self.queue = queue
        self.router = router
        self._directory = directory
        self._releases = releases
        self._legs = legs
        self._clock = clock
        self._pools: dict[PoolId, PoolQueue] = {}
        self._loops: dict[PoolId, asyncio.Task[None]] = {}
        self._cancels: set[asyncio.Task[None]] = set()
        self._cancelling = asyncio.Semaphore(CANCELS_AT_ONCE)

    @property
    def pools(self) -> Sequence[PoolQueue]:
        """Every queue that is in use."""
        return list(self._pools.values())

    def of(self, pool: PoolId) -> PoolQueue | None:
        """The queue of a pool; None where nobody claims."""
        found = self._pools.get(pool)
        return found if found is not None and found.claimers else None

    def leave(self, queue: PoolQueue, expected: Expected, put: asyncio.Task[str] | None, *, read: bool) -> None:
        """Nobody waits for this job any more. If it may be in the queue still, it is cancelled there, once `put` has
        ended. Returns at once.

        `read`: whoever waited knows how it ended; if not, the client may have left at the moment when it did.
        """
        result = expected.result.result() if expected.result.done() else None
        ended = result is not None
        if result is not None and not read:
            self._orphaned(expected.hold, result)
        refused = put is None or (put.done() and isinstance(put.exception(), QueueFull))
        queue.jobs.done(expected, abandoned=not ended and not refused)
        if put is None or ended or refused or len(self._cancels) >= MOST_CANCELS:
            return
        task = asyncio.create_task(self._cancel(queue.pool, expected, put))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    def lost(self, queue: PoolQueue, hold: str, authorization: str) -> None:
        """The store has lost a job. Some worker may compute it, or have done so, and whoever claims is told to let go
        of the blocks: nobody has asked for them by this key, and nobody will. Returns at once.

        Args:
            authorization: the client's, for workers that check it themselves.
        """
        if len(queue.claimers) > MOST_TOLD:
            return
        for id in queue.claimers:
            if (worker := self._directory.get(id)) is not None:
                self._releases.release(Hold(worker.record, hold, authorization=authorization))

    async def _cancel(self, pool: PoolId, expected: Expected, put: asyncio.Task[str]) -> None:
        await asyncio.wait({put})
        if (error := put.exception()) is not None:
            _log.debug("a prefill job was perhaps not put: %s", error)
        async with self._cancelling:
            try:
                await self.queue.cancel(pool, expected.id)
            except (StoreError, OSError) as e:
                # It ends with its deadline; whoever has computed it by then is told to let go of the blocks.
                _log.debug("prefill job %s is not cancelled: %s", expected.id, e)

    def _orphaned(self, hold: str, result: JobResult) -> None:
        """A job finished that nobody waits for: its blocks would be kept until their lease ends."""
        worker = self._directory.get(WorkerId(result.worker))
        if worker is None or result.error:
            return
        try:
            answer = decode_answer(result.data)
        except ValueError:
            return
        if answer.status == 200 and transfer_params(answer.body) is not None:
            self._releases.release(Hold(worker.record, hold))

    async def refresh(self) -> None:
        """Look after every queue once. Never raises for a store that fails."""
        there = set()
        for workers in self._directory.pools:
            there.add(workers[0].pool)
            self._take_over(workers)
        for pool, queue in list(self._pools.items()):
            if pool not in there:
                queue.claimers = frozenset()
                if not queue.jobs.waiting:
                    queue.watched.close()
                    del self._pools[pool]
                    await end_tasks([self._loops.pop(pool)])
        if self._directory.store.up:
            await asyncio.gather(*(self._care(queue) for queue in self.pools))

    async def close(self) -> None:
        """End what runs in the background, after a moment for what is being cancelled. Idempotent."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=LAST_CANCELS_S)
        loops, self._loops = list(self._loops.values()), {}
        await end_tasks([*loops, *self._cancels])

    def _take_over(self, workers: Sequence[Worker]) -> None:
        """What the directory says of a pool now."""
        pool, now = workers[0].pool, self._clock()
        registered = [worker for worker in workers if worker.source is Source.STORE]
        claiming = [worker for worker in registered if worker.record.claims and worker.hands_over]
        queue = self._pools.get(pool)
        if queue is None:
            if not claiming:
                return
            jobs = JobResults(self.queue, pool, self.router, self._orphaned, self._clock)
            queue = self._pools[pool] = PoolQueue(pool, jobs, Claimants(self._directory, self._legs))
            self._loops[pool] = asyncio.create_task(repeat(jobs.refresh, 0.0))
        queue.claimers = frozenset(worker.id for worker in claiming if not worker.is_broken)
        queue.asks_key = any(worker.record.asks_key for worker in claiming)
        if claiming:
            queue.models = frozenset.intersection(*(frozenset(worker.record.models) for worker in claiming))
        queue.seen |= {worker.id: now + worker.lease_left_ms(now) / 1000 for worker in registered}

    async def _care(self, queue: PoolQueue) -> None:
        now, pool = self._clock(), queue.pool
        try:
            if now - queue.announced_at >= ANNOUNCE_S:
                await self.queue.announce_router(pool, self.router, ANNOUNCED_MS)
                queue.announced_at = now
            owners = await self.queue.streams(pool)
            await self._rehome(queue, owners)
            await self._give_away(queue)
            if now - queue.reclaimed_at >= RECLAIM_S:
                for owner in (None, *owners):
                    await _until_done(partial(self.queue.reclaim, pool, owner))
                queue.reclaimed_at = now
            if now - queue.depth_at >= DEPTH_S:
                queue.depths = await self.queue.depth(pool, owners)
                queue.depth_at = now
            if not queue.claimers:
                await queue.jobs.lose_unclaimed()
        except (StoreError, OSError) as e:
            queue.failed(str(e))
        else:
            queue.up = True

    async def _rehome(self, queue: PoolQueue, owners: Sequence[WorkerId]) -> None:
        """Give the jobs of workers that are not registered, or do not prefill any more, to others."""
        now = self._clock()
        before, queue.missing = queue.missing, {}
        for owner in owners:
            if (known := self._directory.get(owner)) is not None:
                if not known.hands_over:
                    # It does something else now, or is about to; what it has claimed it finishes.
                    await _until_done(partial(self.queue.rehome, queue.pool, owner, claims=False))
                continue
            lease_end = queue.seen.get(owner)
            since, lease_ended = before.get(owner) or (now, None if lease_end is None else now >= lease_end)
            queue.missing[owner] = since, lease_ended
            what = departure(now - since, lease_ended=lease_ended)
            if what is not Departure.KEEP:
                claims = what is Departure.GIVE_UP
                moved = await _until_done(partial(self.queue.rehome, queue.pool, owner, claims=claims))
                if moved:
                    _log.info("%d prefill jobs of worker %s, which left, go to others", moved, owner)
        kept = {*queue.missing, *(owner for owner in queue.seen if self._directory.get(owner) is not None)}
        queue.seen = {owner: end for owner, end in queue.seen.items() if owner in kept}

    async def _give_away(self, queue: PoolQueue) -> None:
        """Give the jobs of workers that are registered, but found to be down, to others."""
        overdue = queue.jobs.overdue(SUSPECT_S)
        found = await self.queue.jobs(queue.pool, LOOKED_AT) if overdue else ()
        for worker in queue.watched.look(overdue, found, self._clock()):
            moved = await _until_done(partial(self.queue.rehome, queue.pool, worker))
            _log.warning("%d prefill jobs of worker %s, which gives no sign of life, go to others", moved, worker)


async def _until_done(move: Callable[[], Awaitable[int]]) -> int:
    """Repeat a call that moves some jobs at once until it has moved all; returns how many."""
    total = 0
    for _ in range(MOST_CALLS):
        moved = await move()
        total += moved
        if moved < MOST_AT_ONCE:
            break
    return total
