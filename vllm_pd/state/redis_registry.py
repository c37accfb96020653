"""The registry in Redis (or Valkey, 6.2 or newer).

Leases are measured by the store's clock, inside scripts. Every call has one deadline for all its round trips and is
never repeated: a caller that wants to try again does so at its own pace. One instance belongs to one event loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from redis.exceptions import ResponseError

from vllm_pd.state import codec, scripts
from vllm_pd.state.base import (
    Epoch,
    HeartbeatResult,
    PoolId,
    RegistrySnapshot,
    RouterWork,
    TokenizerFiles,
    WorkerId,
    WorkerLoad,
    WorkerRecord,
    WorkerState,
)
from vllm_pd.state.keys import Keys
from vllm_pd.state.redis_calls import RedisCalls, execute

T = TypeVar("T")
_POOL_ID = re.compile(rb"[0-9a-f]{16}")


class RedisRegistry:
    """Implements `Registry` over redis-py.

    Args:
        url: `redis://`, `rediss://` or `unix://`, as redis-py reads it (`?ssl_ca_certs=FILE` and so on).
        namespace: clusters of different namespaces share a store without seeing each other.
        timeout_s: deadline of one call.
        bulk_timeout_s: deadline of a call that moves tokenizer files (tens of megabytes).

    Raises:
        SettingsError: malformed URL or namespace. Connecting happens at the first call, never here.
    """

    def __init__(self, url: str, namespace: str, *, timeout_s: float = 0.5, bulk_timeout_s: float = 10.0) -> None:
        self.keys = Keys(namespace)
        self._calls = RedisCalls(url, timeout_s=timeout_s, longest_s=bulk_timeout_s)
        self._client = self._calls.client
        self._bulk_timeout_s = bulk_timeout_s

    @property
    def malformed_total(self) -> int:
        """Entries of the store that were skipped because they could not be read, since the start."""
        return self._calls.malformed_total

    async def heartbeat(self, record: WorkerRecord, lease_ms: int) -> HeartbeatResult:
        pool = record.pool.id
        args = [record.id, record.epoch, lease_ms, codec.encode_record(record)]
        async with self._calls.answer():
            reply: bytes = await scripts.HEARTBEAT.run(self._client, self._keys_of(pool, record.id), args)
            result = HeartbeatResult(reply.decode())
            if result is not HeartbeatResult.STALE:
                # Another slot, hence another command; the next heartbeat repairs it if only this one is lost.
                await scripts.TOUCH_POOL.run(self._client, [self.keys.pools], [pool, lease_ms])
        return result

    async def publish_load(
        self, worker: WorkerId, pool: PoolId, writer: int, loads: Mapping[int, WorkerLoad], ttl_ms: int
    ) -> None:
        args = [writer, ttl_ms, codec.encode_loads(loads)]
        async with self._calls.answer():
            await scripts.PUBLISH.run(self._client, [self.keys.load(pool, worker)], args)

    async def publish_inflight(
        self, router_id: str, pool: PoolId, work: Mapping[WorkerId, RouterWork], ttl_ms: int
    ) -> None:
        args = [router_id, ttl_ms, codec.encode_work(work)]
        async with self._calls.answer():
            await scripts.PUBLISH.run(self._client, [self.keys.inflight(pool)], args)

    async def withdraw(self, worker: WorkerId, pool: PoolId, epoch: Epoch) -> bool:
        async with self._calls.answer():
            removed: int = await scripts.WITHDRAW.run(self._client, self._keys_of(pool, worker), [worker, epoch])
        return bool(removed)

    async def snapshot(self) -> RegistrySnapshot:
        """Three round trips, however many pools and workers there are. One unreadable entry costs only itself."""
        bad: list[str] = []
        states: list[WorkerState] = []
        async with self._calls.answer():
            pools = await self._live_pools(bad)
            members = await self._live_members(pools, bad)
            # The store's time at which each pool's members were read.
            times = {pool: now for pool, _, now, _ in members}
            async with self._client.pipeline(transaction=False) as pipe:
                for pool, worker, *_ in members:
                    pipe.hget(self.keys.worker(pool, worker), "record")
                    pipe.hgetall(self.keys.load(pool, worker))
                for pool in times:
                    pipe.hgetall(self.keys.inflight(pool))
                found = await execute(pipe)
        replies, works = found[: 2 * len(members)], found[2 * len(members) :]
        others = {}
        for (pool, now), work in zip(times.items(), works, strict=True):
            fields, unreadable = _fresh_fields(work, now, _decode_work)
            if unreadable:
                bad.append(self.keys.inflight(pool))
            others[pool] = codec.by_worker(fields)
        for (pool, worker, now, ends), record, loads in zip(members, replies[0::2], replies[1::2], strict=True):
            if record is None:
                # Evicted, or ended since the second round trip.
                continue
            decoded = _decode_record(record, pool, worker)
            if decoded is None:
                bad.append(self.keys.worker(pool, worker))
                continue
            entries, unreadable = _fresh_fields(loads, now, _decode_load)
            if unreadable:
                bad.append(self.keys.load(pool, worker))
            states.append(
                WorkerState(decoded, int(ends - now), codec.merge_loads(entries), others[pool].get(worker, {}))
            )
        self._calls.report(bad)
        return codec.assemble(states)

    async def find(self, worker: WorkerId, pool: PoolId) -> WorkerState | None:
        keys = self._keys_of(pool, worker)
        async with self._calls.answer():
            reply = await scripts.FIND.run(self._client, keys, [worker])
        if not reply:
            return None
        now, ends, data, flat = reply
        record = _decode_record(data, pool, worker)
        entries, unreadable = _fresh_fields(dict(zip(flat[0::2], flat[1::2], strict=True)), float(now), _decode_load)
        self._calls.report([keys[1]] * (record is None) + [keys[2]] * unreadable)
        if record is None:
            return None
        return WorkerState(record, int(float(ends) - float(now)), codec.merge_loads(entries))

    async def put_tokenizer(self, pool: PoolId, files: TokenizerFiles, ttl_ms: int) -> str:
        sha = files.sha
        key = self.keys.tokenizer(pool, sha)
        async with self._calls.answer(self._bulk_timeout_s):
            if not await self._client.pexpire(key, ttl_ms):
                await self._client.set(key, codec.encode_tokenizer(files), px=ttl_ms)
        return sha

    async def get_tokenizer(self, pool: PoolId, sha: str) -> TokenizerFiles | None:
        key = self.keys.tokenizer(pool, sha)
        async with self._calls.answer(self._bulk_timeout_s):
            data: bytes | None = await self._client.get(key)
        if data is None:
            return None
        files = codec.decode_tokenizer(data, sha)
        self._calls.report([] if files else [key])
        return files

    async def close(self) -> None:
        await self._calls.close()

    def _keys_of(self, pool: PoolId, worker: WorkerId) -> list[str]:
        """The keys that scripts about one worker take."""
        return [self.keys.workers(pool), self.keys.worker(pool, worker), self.keys.load(pool, worker)]

    async def _live_pools(self, bad: list[str]) -> list[PoolId]:
        _, flat = await scripts.LIVE.run(self._client, [self.keys.pools], [])
        names: list[bytes] = flat[0::2]
        good = [name for name in names if _POOL_ID.fullmatch(name)]
        if len(good) < len(names):
            bad.append(self.keys.pools)
        return [PoolId(name.decode()) for name in good]

    async def _live_members(
        self, pools: Sequence[PoolId], bad: list[str]
    ) -> list[tuple[PoolId, WorkerId, float, float]]:
        """(pool, worker, the store's time, end of its lease), times in ms."""
        async with self._client.pipeline(transaction=False) as pipe:
            for pool in pools:
                # As text: the pipelines of a cluster's client take no digests.
                pipe.eval(scripts.LIVE.text, 1, self.keys.workers(pool))
            replies = await execute(pipe)
        members = []
        for pool, reply in zip(pools, replies, strict=True):
            if isinstance(reply, ResponseError):
                bad.append(self.keys.workers(pool))
                continue
            now, flat = reply
            for name, ends in zip(flat[0::2], flat[1::2], strict=True):
                try:
                    members.append((pool, WorkerId(name.decode()), float(now), float(ends)))
                except UnicodeDecodeError:
                    bad.append(self.keys.workers(pool))
        return members


def _decode_record(reply: bytes | ResponseError, pool: PoolId, worker: WorkerId) -> WorkerRecord | None:
    """The record, or None when it is unreadable or speaks of another worker than its key."""
    if isinstance(reply, ResponseError):
        return None
    try:
        record = codec.decode_record(reply)
    except ValueError:
        return None
    return record if record.id == worker and record.pool.id == pool else None


def _decode_load(writer: bytes, data: bytes) -> dict[int, WorkerLoad]:
    return codec.decode_loads(data)


def _decode_work(router: bytes, data: bytes) -> tuple[str, dict[WorkerId, RouterWork]]:
    return router.decode(), codec.decode_work(data)


def _fresh_fields(
    reply: Mapping[bytes, bytes] | ResponseError, now_ms: float, decode: Callable[[bytes, bytes], T]
) -> tuple[list[T], bool]:
    """Fields that have not ended, and whether some were unreadable."""
    if isinstance(reply, ResponseError):
        return [], True
    fresh, unreadable = [], False
    for writer, value in reply.items():
        ends, _, payload = value.partition(b":")
        try:
            if float(ends) > now_ms:
                fresh.append(decode(writer, payload))
        except ValueError:
            unreadable = True
    return fresh, unreadable
