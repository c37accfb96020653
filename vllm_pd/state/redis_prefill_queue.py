"""The prefill queue in Redis (or Valkey, 6.2 or newer)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from vllm_pd.state import queue_scripts as scripts
from vllm_pd.state.base import PoolId, WorkerId
from vllm_pd.state.keys import Keys
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
from vllm_pd.state.redis_calls import RedisCalls

_MOST = 64
_LONGEST_WAIT_MS = 30_000


class RedisPrefillQueue:
    """Implements `PrefillQueue` over redis-py. A call that waits holds a connection of its own meanwhile.

    Args:
        url: store URL.
        namespace: clusters of different namespaces share a store without seeing each other.
        limits: the same for all who use the queue.
        timeout_s: deadline of one call, over what it was asked to wait (30 s at most).

    Raises:
        SettingsError: malformed URL or namespace.
    """

    def __init__(self, url: str, namespace: str, *, limits: QueueLimits | None = None, timeout_s: float = 0.5) -> None:
        self._keys = Keys(namespace)
        self._limits = limits or QueueLimits()
        self._calls = RedisCalls(url, timeout_s=timeout_s, longest_s=timeout_s + _LONGEST_WAIT_MS / 1000)
        self._client = self._calls.client

    @property
    def malformed_total(self) -> int:
        """Entries of the store that were skipped because they could not be read, since the start."""
        return self._calls.malformed_total

    async def put(self, pool: PoolId, job: PrefillJob, ttl_ms: int) -> bool:
        keys = (self._keys.prefill(pool, job.worker), self._keys.job(pool, job.id), self._keys.done(pool, job.id))
        args = (job.id, job.tokens, job.payload, ttl_ms, self._limits.length, self._keys.job(pool, ""))
        async with self._calls.answer():
            answer: bytes = await scripts.PUT.run(self._client, keys, args)
        if answer == b"full":
            raise full_queue(job, self._limits)
        return answer == b"put"

    async def claim(
        self, pool: PoolId, worker: WorkerId, *, steal_from: WorkerId | None = None, wait_ms: int = 0
    ) -> Claim | None:
        streams: list[WorkerId | None] = [worker, None]
        if steal_from is not None:
            streams.append(steal_from)
        keys = [self._keys.prefill(pool, stream) for stream in streams]
        args = (self._keys.job(pool, ""), worker, self._limits.visibility_ms)
        deadline = time.monotonic() + min(wait_ms, _LONGEST_WAIT_MS) / 1000
        while True:
            async with self._calls.answer():
                number, *found = await scripts.CLAIM.run(self._client, keys, args)
            if number:
                entry, name, tokens, attempt, payload = found
                job = PrefillJob(JobId(name.decode()), int(tokens), payload, streams[number - 1])
                return Claim(job, worker, attempt, entry.decode())
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0:
                return None
            seen = dict(zip(keys[:2], found[:2], strict=True))
            async with self._calls.answer(self._calls.timeout_s + left_ms / 1000):
                # Only to be woken: whoever of those that wake is first gets the job.
                await self._client.xread(seen, count=1, block=left_ms)

    async def extend(self, pool: PoolId, claim: Claim) -> bool:
        args = (claim.entry, claim.claimant, self._limits.visibility_ms)
        async with self._calls.answer():
            return bool(await scripts.EXTEND.run(self._client, self._claim_keys(pool, claim), args))

    async def ack(self, pool: PoolId, claim: Claim, result: bytes) -> bool:
        keys = (*self._claim_keys(pool, claim), self._keys.done(pool, claim.job.id))
        args = (claim.entry, claim.claimant, result, self._limits.result_ttl_ms)
        async with self._calls.answer():
            return bool(await scripts.ACK.run(self._client, keys, args))

    async def fail(self, pool: PoolId, claim: Claim, error: str) -> bool:
        keys = (*self._claim_keys(pool, claim), self._keys.prefill(pool, None), self._keys.dead_jobs(pool))
        args = (*self._give_up(pool), claim.entry, claim.claimant, error)
        async with self._calls.answer():
            return bool(await scripts.FAIL.run(self._client, keys, args))

    async def cancel(self, pool: PoolId, job: JobId) -> bool:
        async with self._calls.answer():
            return bool(await scripts.CANCEL.run(self._client, (self._keys.job(pool, job),), ()))

    async def reclaim(self, pool: PoolId, worker: WorkerId | None) -> int:
        keys = (self._keys.prefill(pool, worker), self._keys.prefill(pool, None), self._keys.dead_jobs(pool))
        async with self._calls.answer():
            args = (*self._give_up(pool), self._limits.visibility_ms, _MOST)
            return int(await scripts.RECLAIM.run(self._client, keys, args))

    async def rehome(self, pool: PoolId, worker: WorkerId) -> int:
        keys = (self._keys.prefill(pool, worker), self._keys.prefill(pool, None), self._keys.dead_jobs(pool))
        async with self._calls.answer():
            return int(await scripts.REHOME.run(self._client, keys, (*self._give_up(pool), worker, _MOST)))

    async def depth(self, pool: PoolId, workers: Sequence[WorkerId]) -> Mapping[WorkerId | None, QueueDepth]:
        streams: list[WorkerId | None] = [None, *workers]
        keys = [self._keys.prefill(pool, stream) for stream in streams]
        async with self._calls.answer():
            counts = await scripts.DEPTH.run(self._client, keys, (self._keys.job(pool, ""),))
        return {stream: QueueDepth(*count) for stream, count in zip(streams, counts, strict=True)}

    async def wait_done(self, pool: PoolId, job: JobId, wait_ms: int) -> JobResult | None:
        key = self._keys.done(pool, job)
        wait_s = min(wait_ms, _LONGEST_WAIT_MS) / 1000
        async with self._calls.answer(self._calls.timeout_s + wait_s):
            found: bytes | None = await self._client.lindex(key, 0)
            if found is None and wait_s > 0:
                # Moved onto itself: a result that got lost on the way can be asked for again.
                found = await self._client.blmove(key, key, wait_s, "LEFT", "LEFT")
        if not found:
            return None
        return JobResult(found[1:]) if found[:1] == b"d" else JobResult(b"", found[1:].decode(errors="replace"))

    async def dead(self, pool: PoolId, limit: int = 100) -> Sequence[DeadJob]:
        key = self._keys.dead_jobs(pool)
        async with self._calls.answer():
            entries = await self._client.xrevrange(key, count=limit)
        jobs, bad = [], []
        for entry, fields in entries:
            try:
                numbers = int(fields[b"tokens"]), int(fields[b"attempts"])
                error = fields[b"error"].decode(errors="replace")
                jobs.append(DeadJob(JobId(fields[b"job"].decode()), *numbers, error))
            except (KeyError, ValueError):
                bad.append(f"{key} {entry!r}")
        self._calls.report(bad)
        return jobs

    async def close(self) -> None:
        await self._calls.close()

    def _claim_keys(self, pool: PoolId, claim: Claim) -> tuple[str, str]:
        return self._keys.prefill(pool, claim.job.worker), self._keys.job(pool, claim.job.id)

    def _give_up(self, pool: PoolId) -> tuple[object, ...]:
        """The arguments of every script that may give a job up."""
        names = (self._keys.job(pool, ""), self._keys.done(pool, ""))
        streams = (self._keys.prefill(pool, None), self._keys.dead_jobs(pool))
        limits = self._limits
        return (*names, *streams, limits.attempts, limits.result_ttl_ms, limits.dead_letters)
