"""The prefill queue in Redis (or Valkey, 6.2 or newer)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_pd.errors import StoreError
from vllm_pd.state import queue_scripts as scripts
from vllm_pd.state import queue_views
from vllm_pd.state.base import Epoch, PoolId, WorkerId
from vllm_pd.state.keys import Keys
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
from vllm_pd.state.redis_calls import RedisCalls, Script

_MOST = 64
_LONGEST_WAIT_MS = 30_000
_AT_ONCE = 16
_LEAST_ORDER = -(1 << 63)
_MOST_UNANSWERED = 8


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
        self._room = asyncio.Semaphore(_AT_ONCE)
        """A burst of calls shares connections: to open one takes as long as many calls, and they are limited."""
        self._common: dict[PoolId, tuple[object, ...]] = {}
        self._taken: dict[str, list[bytes]] = {}
        """Entries of streams that only this process reads, which were handed out and can go."""
        self._unanswered: dict[tuple[PoolId, Claimant], list[str]] = {}
        """Names of claims whose answers were lost."""

    @property
    def malformed_total(self) -> int:
        """Entries of the store that were skipped because they could not be read, since the start."""
        return self._calls.malformed_total

    async def put(self, pool: PoolId, job: PrefillJob, ttl_ms: int) -> bool:
        keys = (self._keys.prefill(pool, job.worker), self._keys.job(pool, job.id), self._keys.done(pool, job.id))
        args = (job.id, job.tokens, _order_text(job.order), job.router, job.payload, ttl_ms, self._limits.length)
        answer = await self._run(scripts.PUT, pool, keys, *args)
        if answer == b"full":
            raise full_queue(job, self._limits)
        return bool(answer == b"put")

    async def claim(
        self, pool: PoolId, claimant: Claimant, *, fits: int, steal_from: WorkerId | None = None, wait_ms: int = 0
    ) -> Claim | None:
        streams: list[WorkerId | None] = [claimant.worker, None]
        if steal_from is not None:
            streams.append(steal_from)
        keys = [self._keys.prefill(pool, stream) for stream in streams]
        args = (str(claimant), claimant.worker, claimant.epoch, fits, self._keys.worker(pool, claimant.worker))
        unanswered = self._unanswered.setdefault((pool, claimant), [])
        deadline = time.monotonic() + min(wait_ms, _LONGEST_WAIT_MS) / 1000
        while True:
            name, lost = f"{random.getrandbits(64):x}", "".join(f" {each} " for each in unanswered)
            try:
                number, *found = await self._run(scripts.CLAIM, pool, keys, *args, name, lost)
            except StoreError:
                # It may have got a job all the same, which would wait until it is missed.
                unanswered[:] = [*unanswered[1 - _MOST_UNANSWERED :], name]
                raise
            if number and found[-1].decode() in unanswered:
                unanswered.remove(found[-1].decode())
            else:
                unanswered.clear()
            if number:
                entry, job_name, tokens, order, router, attempt, payload, _ = found
                stream = streams[number - 1]
                job = PrefillJob(JobId(job_name.decode()), int(tokens), payload, stream, _order(order), router.decode())
                return Claim(job, claimant, attempt, entry.decode())
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0:
                return None
            # Only to be woken: whoever of those that wake is first gets the job.
            if not await self._read(dict(zip(keys[:2], found, strict=True)), 1, left_ms):
                return None

    async def extend(self, pool: PoolId, claim: Claim) -> bool:
        return bool(await self._run_claim(scripts.EXTEND, pool, claim))

    async def ack(self, pool: PoolId, claim: Claim, result: bytes) -> bool:
        return bool(await self._run_claim(scripts.ACK, pool, claim, self._keys.done(pool, claim.job.id), result))

    async def fail(self, pool: PoolId, claim: Claim, error: str) -> bool:
        return bool(await self._run_claim(scripts.FAIL, pool, claim, error))

    async def release(self, pool: PoolId, claim: Claim) -> bool:
        return bool(await self._run_claim(scripts.RELEASE, pool, claim))

    async def cancel(self, pool: PoolId, job: JobId, error: str = "") -> bool:
        keys = (self._keys.job(pool, job), self._keys.done(pool, job))
        return bool(await self._run(scripts.CANCEL, pool, keys, job, error))

    async def cancelled(self, pool: PoolId, claimant: Claimant, wait_ms: int = 0) -> Sequence[JobId]:
        found = await self._take(self._keys.cancelled(pool, str(claimant)), wait_ms)
        return [JobId(fields[b"job"].decode()) for fields in found if b"job" in fields]

    async def reclaim(self, pool: PoolId, worker: WorkerId | None) -> int:
        return int(await self._run(scripts.RECLAIM, pool, (self._keys.prefill(pool, worker),), _MOST))

    async def takeover(self, pool: PoolId, worker: WorkerId, epoch: Epoch) -> int:
        return int(await self._run(scripts.TAKEOVER, pool, (self._keys.claims(pool, worker),), worker, epoch, _MOST))

    async def rehome(self, pool: PoolId, worker: WorkerId, *, claims: bool = True) -> int:
        key = self._keys.prefill(pool, worker)
        return int(await self._run(scripts.REHOME, pool, (key,), worker, _MOST, int(claims)))

    async def announce_router(self, pool: PoolId, router: str, ttl_ms: int) -> None:
        async with self._calls.answer():
            await self._client.set(self._keys.router(pool, router), b"1", px=ttl_ms)

    async def results(self, pool: PoolId, router: str, wait_ms: int = 0) -> Sequence[tuple[JobId, JobResult]]:
        out, bad = [], []
        key = self._keys.results(pool, router)
        for fields in await self._take(key, wait_ms):
            try:
                name, worker = JobId(fields[b"job"].decode()), fields[b"worker"].decode()
                kind, data = fields[b"kind"], fields[b"data"]
            except (KeyError, ValueError):
                bad.append(key)
                continue
            error = "" if kind == b"d" else data.decode(errors="replace")
            out.append((name, JobResult(data if kind == b"d" else b"", error, worker)))
        self._calls.report(bad)
        return out

    async def depth(self, pool: PoolId, workers: Sequence[WorkerId]) -> Mapping[WorkerId | None, QueueDepth]:
        streams: list[WorkerId | None] = [None, *workers]
        keys = [self._keys.prefill(pool, stream) for stream in streams]
        async with self._calls.answer():
            counts = await queue_views.DEPTH.run(self._client, keys, (self._keys.job(pool, ""),))
        return {stream: QueueDepth(*count) for stream, count in zip(streams, counts, strict=True)}

    async def streams(self, pool: PoolId) -> Sequence[WorkerId]:
        found = await self._run(queue_views.STREAMS, pool, (self._keys.owners(pool),))
        return sorted(WorkerId(worker.decode()) for worker in found)

    async def jobs(self, pool: PoolId, limit: int = 100) -> Sequence[JobInfo]:
        keys = [self._keys.prefill(pool, stream) for stream in (None, *await self.streams(pool))]
        return [_info(found) for found in await self._run(queue_views.JOBS, pool, keys, limit)]

    async def peek(self, pool: PoolId, job: JobId) -> tuple[JobInfo, bytes] | None:
        found = await self._run(queue_views.PEEK, pool, (self._keys.job(pool, job),))
        return (_info(found[0]), found[1]) if found else None

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

    async def _run(self, script: Script, pool: PoolId, keys: Sequence[str], *args: object) -> Any:
        common = self._common.get(pool)
        if common is None:
            common = self._common[pool] = self._common_args(pool)
        async with self._calls.answer(), self._room:
            return await script.run(self._client, keys, (*common, *args))

    async def _run_claim(self, script: Script, pool: PoolId, claim: Claim, *args: object) -> Any:
        keys = (self._keys.prefill(pool, claim.job.worker), self._keys.job(pool, claim.job.id))
        return await self._run(script, pool, keys, claim.entry, str(claim.claimant), claim.claimant.worker, *args)

    async def _take(self, key: str, wait_ms: int) -> list[dict[bytes, bytes]]:
        """What came to a stream that nobody else reads. It is deleted later: if the answer gets lost, it is there."""
        taken = self._taken.setdefault(key, [])
        if len(taken) >= RESULTS_A_CALL:
            await self._forget(key, taken)
        try:
            read = await self._read({key: taken[-1] if taken else "0-0"}, RESULTS_A_CALL, wait_ms)
        except StoreError:
            # Whatever store answers next may be another one, with entries that are older by its clock.
            taken.clear()
            raise
        entries = read[0][1] if read else []
        taken += [entry for entry, _ in entries]
        if taken and not entries:
            await self._forget(key, taken)
        return [fields for _, fields in entries]

    async def _forget(self, key: str, taken: list[bytes]) -> None:
        async with self._calls.answer(), self._room:
            await self._client.xdel(key, *taken)
        taken.clear()

    async def _read(self, after: Mapping[str, bytes | str], count: int, wait_ms: int) -> Any:
        wait_ms = min(wait_ms, _LONGEST_WAIT_MS)
        async with self._calls.answer(self._calls.timeout_s + wait_ms / 1000):
            return await self._client.xread(dict(after), count=count, block=wait_ms or None)

    def _common_args(self, pool: PoolId) -> tuple[object, ...]:
        """What every script begins with."""
        keys, limits = self._keys, self._limits
        prefixes = (keys.job, keys.done, keys.results, keys.router, keys.claims, keys.cancelled)
        names = (keys.prefill(pool, None), keys.owners(pool), keys.dead_jobs(pool))
        times = (limits.attempts, limits.visibility_ms, limits.patience_ms, limits.silence_ms)
        args = (*(name(pool, "") for name in prefixes), *names, *times, limits.result_ttl_ms, limits.dead_letters)
        assert len(args) == scripts.COMMON_ARGS
        return args


def _order_text(order: int) -> str:
    """As text that sorts as the numbers do: Lua's numbers have 53 bits."""
    return f"{order - _LEAST_ORDER:020d}"


def _order(text: bytes) -> int:
    return int(text) + _LEAST_ORDER


def _info(found: Sequence[Any]) -> JobInfo:
    name, stream, tokens, order, router, age_ms, left_ms, attempt, claimant = found
    worker = WorkerId(stream.decode()) if stream else None
    return JobInfo(
        JobId(name.decode()),
        worker,
        int(tokens),
        _order(order),
        router.decode(),
        age_ms,
        left_ms,
        attempt,
        claimant.decode(),
    )
