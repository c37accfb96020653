"""The prefill queue in this process's memory; "the store" is a `MemoryStore`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from vllm_pd.state.base import Epoch, PoolId, WorkerId
from vllm_pd.state.keys import check_namespace
from vllm_pd.state.memory_store import MemoryJob, MemoryQueue, MemoryStore, Namespace
from vllm_pd.state.prefill_queue import (
    RESULTS_A_CALL,
    Claim,
    Claimant,
    DeadJob,
    JobId,
    JobInfo,
    JobResult,
    PrefillJob,
    QueueDepth,
    QueueLimits,
    full_queue,
)

_Item = TypeVar("_Item")

_MOST = 64
_LOOKED_AT = 64
# A claimed job outlives the silence of its worker by as much as others need to see it.
_CLAIMED_LIVES = 4


class MemoryPrefillQueue:
    """Implements `PrefillQueue` over a `MemoryStore`; never raises `StoreError`."""

    def __init__(self, namespace: str, store: MemoryStore | None = None, *, limits: QueueLimits | None = None) -> None:
        self._namespace = check_namespace(namespace)
        self._store = store or MemoryStore()
        self._limits = limits or QueueLimits()

    async def put(self, pool: PoolId, job: PrefillJob, ttl_ms: int) -> bool:
        with self._queue(pool) as queue:
            if job.id in queue.jobs or job.id in queue.ended:
                return False
            now = self._store.now_ms()
            here = [each for each in queue.jobs.values() if each.job.worker == job.worker]
            if len(here) >= self._limits.length:
                forsaken = [each for each in here if each.claimant is None and self._forsaken(queue, each)]
                for each in forsaken:
                    self._drop(queue, each)
                if len(here) - len(forsaken) >= self._limits.length:
                    raise full_queue(job, self._limits)
            self._append(queue, MemoryJob(job, "", now, now + ttl_ms))
        return True

    async def claim(
        self, pool: PoolId, claimant: Claimant, *, fits: int, steal_from: WorkerId | None = None, wait_ms: int = 0
    ) -> Claim | None:
        deadline = time.monotonic() + wait_ms / 1000
        while True:
            with self._space() as space:
                queue = space.queue(pool)
                registered = space.workers.get((pool, claimant.worker))
                claim = None
                if registered is None or registered[0].epoch <= claimant.epoch:
                    claim = self._claim(queue, claimant, fits, steal_from)
                left_ms = (deadline - time.monotonic()) * 1000
                if claim is not None or left_ms <= 0:
                    return claim
                event = queue.waiters.join()
            await queue.waiters.wait(event, left_ms)

    async def extend(self, pool: PoolId, claim: Claim) -> bool:
        with self._queue(pool) as queue:
            held = self._owned(queue, claim)
            if held is None:
                return False
            if self._forsaken(queue, held):
                self._drop(queue, held)
                return False
            self._said(held)
        return True

    async def ack(self, pool: PoolId, claim: Claim, result: bytes) -> bool:
        mark = (claim.entry, claim.claimant)
        with self._queue(pool) as queue:
            held = self._owned(queue, claim)
            if held is None:
                return claim.job.id in queue.ended and queue.ended[claim.job.id][0] == mark
            self._over(queue, held, JobResult(result, worker=claim.claimant.worker), mark)
        return True

    async def fail(self, pool: PoolId, claim: Claim, error: str) -> bool:
        with self._queue(pool) as queue:
            held = self._owned(queue, claim)
            if held is None:
                return False
            self._give_up(queue, held, error)
        return True

    async def release(self, pool: PoolId, claim: Claim) -> bool:
        with self._queue(pool) as queue:
            held = self._owned(queue, claim)
            if held is None:
                return False
            held.attempt -= 1
            self._to_shared(queue, held)
        return True

    async def cancel(self, pool: PoolId, job: JobId, error: str = "") -> bool:
        with self._queue(pool) as queue:
            held = queue.jobs.get(job)
            if held is None:
                queue.ended.setdefault(job, (None, self._result_ends()))
                return False
            worker = held.claimant.worker if held.claimant is not None else ""
            self._over(queue, held, JobResult(b"", error, worker) if error else None)
            if held.claimant is not None:
                queue.cancelled.setdefault(held.claimant, []).append((job, self._result_ends()))
        return True

    async def cancelled(self, pool: PoolId, claimant: Claimant, wait_ms: int = 0) -> Sequence[JobId]:
        return await self._take(pool, lambda queue: queue.cancelled.get(claimant), wait_ms)

    async def reclaim(self, pool: PoolId, worker: WorkerId | None) -> int:
        with self._queue(pool) as queue:
            now = self._store.now_ms()
            late = [
                held
                for held in queue.jobs.values()
                if held.job.worker == worker and held.claimant and now - held.said_ms >= self._limits.visibility_ms
            ][:_MOST]
            for held in late:
                assert held.claimant is not None
                self._give_up(queue, held, f"{held.claimant.worker} said nothing for {now - held.said_ms:.0f} ms")
        return len(late)

    async def takeover(self, pool: PoolId, worker: WorkerId, epoch: Epoch) -> int:
        with self._queue(pool) as queue:
            return self._give_up_claims(
                queue, lambda each: each.worker == worker and each.epoch < epoch, f"{worker} was restarted"
            )

    async def rehome(self, pool: PoolId, worker: WorkerId, *, claims: bool = True) -> int:
        with self._queue(pool) as queue:
            waiting = [held for held in queue.jobs.values() if held.job.worker == worker and held.claimant is None]
            given = 0
            if claims:
                given = self._give_up_claims(queue, lambda each: each.worker == worker, f"{worker} is gone")
            for held in waiting[:_MOST]:
                self._to_shared(queue, held)
        return given + len(waiting[:_MOST])

    async def announce_router(self, pool: PoolId, router: str, ttl_ms: int) -> None:
        with self._queue(pool) as queue:
            queue.routers[router] = self._store.now_ms() + ttl_ms

    async def results(self, pool: PoolId, router: str, wait_ms: int = 0) -> Sequence[tuple[JobId, JobResult]]:
        return await self._take(pool, lambda queue: queue.results.get(router), wait_ms)

    async def depth(self, pool: PoolId, workers: Sequence[WorkerId]) -> Mapping[WorkerId | None, QueueDepth]:
        out: dict[WorkerId | None, QueueDepth] = dict.fromkeys((None, *workers), QueueDepth())
        with self._queue(pool) as queue:
            for held in queue.jobs.values():
                depth = out.get(held.job.worker)
                if depth is None:
                    continue
                tokens = held.job.tokens
                if held.claimant is None:
                    more = (depth.waiting + 1, depth.waiting_tokens + tokens, depth.claimed, depth.claimed_tokens)
                else:
                    more = (depth.waiting, depth.waiting_tokens, depth.claimed + 1, depth.claimed_tokens + tokens)
                out[held.job.worker] = QueueDepth(*more)
        return out

    async def streams(self, pool: PoolId) -> Sequence[WorkerId]:
        with self._queue(pool) as queue:
            held = queue.jobs.values()
            owners = {each.job.worker for each in held if each.job.worker is not None}
            return sorted(owners | {each.claimant.worker for each in held if each.claimant is not None})

    async def jobs(self, pool: PoolId, limit: int = 100) -> Sequence[JobInfo]:
        with self._queue(pool) as queue:
            found = sorted(queue.jobs.values(), key=lambda held: held.job.worker or "")
            return [self._info(held) for held in found[:limit]]

    async def peek(self, pool: PoolId, job: JobId) -> tuple[JobInfo, bytes] | None:
        with self._queue(pool) as queue:
            held = queue.jobs.get(job)
            return (self._info(held), held.job.payload) if held is not None else None

    async def dead(self, pool: PoolId, limit: int = 100) -> Sequence[DeadJob]:
        with self._queue(pool) as queue:
            return list(islice(reversed(queue.dead), limit))

    async def close(self) -> None:
        return None

    @contextmanager
    def _space(self) -> Iterator[Namespace]:
        with self._store.lock:
            yield self._store.namespace(self._namespace)

    @contextmanager
    def _queue(self, pool: PoolId) -> Iterator[MemoryQueue]:
        with self._space() as space:
            yield space.queue(pool)

    async def _take(
        self, pool: PoolId, find: Callable[[MemoryQueue], list[tuple[_Item, float]] | None], wait_ms: int
    ) -> list[_Item]:
        deadline = time.monotonic() + wait_ms / 1000
        while True:
            with self._queue(pool) as queue:
                found = find(queue) or []
                left_ms = (deadline - time.monotonic()) * 1000
                if found or left_ms <= 0:
                    taken, found[:RESULTS_A_CALL] = found[:RESULTS_A_CALL], []
                    return [item for item, _ in taken]
                event = queue.waiters.join()
            await queue.waiters.wait(event, left_ms)

    def _claim(self, queue: MemoryQueue, claimant: Claimant, fits: int, steal_from: WorkerId | None) -> Claim | None:
        turns: list[tuple[WorkerId | None, ...]] = [(claimant.worker, None)]
        if steal_from is not None:
            turns.append((steal_from,))
        now, patience = self._store.now_ms(), self._limits.patience_ms
        for streams in turns:
            for held in self._waiting(queue, streams):
                if self._forsaken(queue, held):
                    self._drop(queue, held)
                elif 0 <= fits < held.job.tokens:
                    if now - held.put_ms >= patience:
                        return None
                elif held.failed != claimant.worker or now - held.came_ms >= patience:
                    held.attempt += 1
                    held.claimant = claimant
                    self._said(held)
                    return Claim(held.job, claimant, held.attempt, held.entry)
        return None

    def _waiting(self, queue: MemoryQueue, streams: Sequence[WorkerId | None]) -> list[MemoryJob]:
        """The oldest of each stream, in the order in which they are to be claimed."""
        found: list[MemoryJob] = []
        for stream in streams:
            here = (held for held in queue.jobs.values() if held.job.worker == stream and held.claimant is None)
            found += islice(here, _LOOKED_AT)
        return sorted(found, key=lambda held: held.job.order)

    def _forsaken(self, queue: MemoryQueue, held: MemoryJob) -> bool:
        """Nobody waits for the job: its router says nothing (any more)."""
        old = self._store.now_ms() - held.put_ms >= self._limits.silence_ms
        return old and bool(held.job.router) and held.job.router not in queue.routers

    def _drop(self, queue: MemoryQueue, held: MemoryJob) -> None:
        worker = held.claimant.worker if held.claimant is not None else ""
        error = f"its router said nothing for {self._limits.silence_ms} ms"
        self._over(queue, held, JobResult(b"", error, worker))

    def _said(self, held: MemoryJob) -> None:
        held.said_ms = self._store.now_ms()
        held.ends = max(held.ends, held.said_ms + _CLAIMED_LIVES * self._limits.visibility_ms)

    def _owned(self, queue: MemoryQueue, claim: Claim) -> MemoryJob | None:
        held = queue.jobs.get(claim.job.id)
        if held is None or (held.entry, held.claimant) != (claim.entry, claim.claimant):
            return None
        return held

    def _append(self, queue: MemoryQueue, held: MemoryJob) -> None:
        """To the end of its stream."""
        queue.entries += 1
        held.entry = str(queue.entries)
        held.came_ms = self._store.now_ms()
        queue.jobs.pop(held.job.id, None)
        queue.jobs[held.job.id] = held
        queue.waiters.wake()

    def _to_shared(self, queue: MemoryQueue, held: MemoryJob) -> None:
        held.job = dataclasses.replace(held.job, worker=None)
        held.claimant = None
        self._append(queue, held)

    def _give_up_claims(self, queue: MemoryQueue, of: Callable[[Claimant], bool], error: str) -> int:
        found = [held for held in queue.jobs.values() if held.claimant is not None and of(held.claimant)][:_MOST]
        for held in found:
            self._give_up(queue, held, error)
        return len(found)

    def _give_up(self, queue: MemoryQueue, held: MemoryJob, error: str) -> None:
        assert held.claimant is not None
        held.failed = held.claimant.worker
        if held.attempt < self._limits.attempts:
            self._to_shared(queue, held)
            return
        queue.dead.append(DeadJob(held.job.id, held.job.tokens, held.attempt, error))
        while len(queue.dead) > self._limits.dead_letters:
            queue.dead.popleft()
        self._over(queue, held, JobResult(b"", error, held.failed))

    def _over(
        self, queue: MemoryQueue, held: MemoryJob, result: JobResult | None, mark: tuple[str, Claimant] | None = None
    ) -> None:
        del queue.jobs[held.job.id]
        queue.ended[held.job.id] = (mark, self._result_ends())
        if held.job.router and result is not None:
            queue.results.setdefault(held.job.router, []).append(((held.job.id, result), self._result_ends()))
        queue.waiters.wake()

    def _result_ends(self) -> float:
        return self._store.now_ms() + self._limits.result_ttl_ms

    def _info(self, held: MemoryJob) -> JobInfo:
        now = self._store.now_ms()
        job, claimant = held.job, str(held.claimant or "")
        times = int(now - held.put_ms), int(held.ends - now)
        return JobInfo(job.id, job.worker, job.tokens, job.order, job.router, *times, held.attempt, claimant)
