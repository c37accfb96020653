"""The prefill queue in this process's memory; "the store" is a `MemoryStore`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

from vllm_pd.state.base import PoolId, WorkerId
from vllm_pd.state.keys import check_namespace
from vllm_pd.state.memory_store import MemoryJob, MemoryQueue, MemoryStore
from vllm_pd.state.prefill_queue import (
    Claim,
    DeadJob,
    JobId,
    JobResult,
    PrefillJob,
    QueueDepth,
    QueueLimits,
    full_queue,
)

_MOST = 64
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
            if job.id in queue.jobs or job.id in queue.results:
                return False
            if sum(1 for each in queue.jobs.values() if each.job.worker == job.worker) >= self._limits.length:
                raise full_queue(job, self._limits)
            self._append(queue, MemoryJob(job, "", self._store.now_ms() + ttl_ms))
        return True

    async def claim(
        self, pool: PoolId, worker: WorkerId, *, steal_from: WorkerId | None = None, wait_ms: int = 0
    ) -> Claim | None:
        deadline = time.monotonic() + wait_ms / 1000
        while True:
            with self._queue(pool) as queue:
                claim = self._claim(queue, worker, steal_from)
                left_ms = (deadline - time.monotonic()) * 1000
                if claim is not None or left_ms <= 0:
                    return claim
                event = queue.waiters.join()
            await queue.waiters.wait(event, left_ms)

    async def extend(self, pool: PoolId, claim: Claim) -> bool:
        with self._queue(pool) as queue:
            held = self._owned(queue, claim)
            if held is not None:
                self._said(held)
        return held is not None

    async def ack(self, pool: PoolId, claim: Claim, result: bytes) -> bool:
        with self._queue(pool) as queue:
            if self._owned(queue, claim) is None:
                return False
            self._finish(queue, claim.job.id, JobResult(result))
        return True

    async def fail(self, pool: PoolId, claim: Claim, error: str) -> bool:
        with self._queue(pool) as queue:
            held = self._owned(queue, claim)
            if held is None:
                return False
            self._give_up(queue, held, error)
        return True

    async def cancel(self, pool: PoolId, job: JobId) -> bool:
        with self._queue(pool) as queue:
            return queue.jobs.pop(job, None) is not None

    async def reclaim(self, pool: PoolId, worker: WorkerId | None) -> int:
        with self._queue(pool) as queue:
            now = self._store.now_ms()
            late = [
                held
                for held in queue.jobs.values()
                if held.job.worker == worker and held.claimant and now - held.said_ms >= self._limits.visibility_ms
            ][:_MOST]
            for held in late:
                self._give_up(queue, held, f"{held.claimant} said nothing for {now - held.said_ms:.0f} ms")
        return len(late)

    async def rehome(self, pool: PoolId, worker: WorkerId) -> int:
        with self._queue(pool) as queue:
            here = [
                held for held in queue.jobs.values() if held.job.worker == worker and held.claimant in (None, worker)
            ][:_MOST]
            for held in here:
                if held.claimant is None:
                    self._to_shared(queue, held)
                else:
                    self._give_up(queue, held, f"{worker} is gone")
        return len(here)

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

    async def wait_done(self, pool: PoolId, job: JobId, wait_ms: int) -> JobResult | None:
        deadline = time.monotonic() + wait_ms / 1000
        while True:
            with self._queue(pool) as queue:
                found = queue.results.get(job)
                left_ms = (deadline - time.monotonic()) * 1000
                if found is not None or left_ms <= 0:
                    return found[0] if found is not None else None
                event = queue.waiters.join()
            await queue.waiters.wait(event, left_ms)

    async def dead(self, pool: PoolId, limit: int = 100) -> Sequence[DeadJob]:
        with self._queue(pool) as queue:
            return list(islice(reversed(queue.dead), limit))

    async def close(self) -> None:
        return None

    @contextmanager
    def _queue(self, pool: PoolId) -> Iterator[MemoryQueue]:
        with self._store.lock:
            yield self._store.namespace(self._namespace).queue(pool)

    def _claim(self, queue: MemoryQueue, worker: WorkerId, steal_from: WorkerId | None) -> Claim | None:
        for stream in (worker, None, *((steal_from,) if steal_from is not None else ())):
            for held in queue.jobs.values():
                if held.job.worker == stream and held.claimant is None:
                    held.attempt += 1
                    held.claimant = worker
                    self._said(held)
                    return Claim(held.job, worker, held.attempt, held.entry)
        return None

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
        queue.jobs.pop(held.job.id, None)
        queue.jobs[held.job.id] = held
        queue.waiters.wake()

    def _to_shared(self, queue: MemoryQueue, held: MemoryJob) -> None:
        held.job = dataclasses.replace(held.job, worker=None)
        held.claimant = None
        self._append(queue, held)

    def _give_up(self, queue: MemoryQueue, held: MemoryJob, error: str) -> None:
        if held.attempt < self._limits.attempts:
            self._to_shared(queue, held)
            return
        queue.dead.append(DeadJob(held.job.id, held.job.tokens, held.attempt, error))
        while len(queue.dead) > self._limits.dead_letters:
            queue.dead.popleft()
        self._finish(queue, held.job.id, JobResult(b"", error))

    def _finish(self, queue: MemoryQueue, job: JobId, result: JobResult) -> None:
        del queue.jobs[job]
        queue.results[job] = (result, self._store.now_ms() + self._limits.result_ttl_ms)
        queue.waiters.wake()
