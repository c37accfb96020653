"""The block index in Redis (or Valkey, 6.2 or newer).

Per pool there are a stream of changes and a directory of caches; per cache a small hash and, for each 2,040 blocks,
one string (`block_codec`). Nobody ever scans the store: a cache's keys are known from its hash, the caches from the
directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from vllm_pd.errors import IndexLost, StoreError
from vllm_pd.state.base import Epoch, PoolId
from vllm_pd.state.block_codec import blocks_of_slab, decode_digests, decode_entry, order
from vllm_pd.state.block_index import (
    START,
    BlockWriter,
    CacheStats,
    Digest,
    HeldBlocks,
    Holder,
    IndexStats,
    Packed,
    Position,
    StreamEntry,
    Tier,
)
from vllm_pd.state.keys import Keys, cache_name, parse_cache_name
from vllm_pd.state.redis_block_writer import RedisBlockWriter
from vllm_pd.state.redis_calls import RedisCalls, execute

# Half a megabyte per round trip: no call holds the store, or this loop, for long.
_SLABS_PER_CALL = 16
_KEYS_PER_CALL = 256
_ATTEMPTS = 5
_LONGEST_WAIT_MS = 30_000


@dataclass(frozen=True, slots=True)
class _Cache:
    """What a cache's hash says."""

    generation: int
    seq: int
    slabs: int
    digests: Mapping[int, Digest]


class RedisBlockIndex:
    """Implements `BlockIndex` over redis-py.

    Args:
        url: store URL.
        namespace: clusters of different namespaces share a store without seeing each other.
        timeout_s: deadline of one call to the store; a method may take several.

    Raises:
        SettingsError: malformed URL or namespace. Connecting happens at the first call, never here.
    """

    def __init__(self, url: str, namespace: str, *, timeout_s: float = 0.5) -> None:
        self._keys = Keys(namespace)
        self._calls = RedisCalls(url, timeout_s=timeout_s, longest_s=timeout_s + _LONGEST_WAIT_MS / 1000)
        self._client = self._calls.client

    @property
    def malformed_total(self) -> int:
        """Entries of the store that were skipped because they could not be read, since the start."""
        return self._calls.malformed_total

    def writer(self, pool: PoolId, holder: Holder, epoch: Epoch, ttl_ms: int) -> BlockWriter:
        return RedisBlockWriter(self._calls, self._keys, pool, holder, epoch, ttl_ms)

    async def tail(self, pool: PoolId) -> Position:
        async with self._calls.answer():
            return await self._tail(self._keys.events(pool))

    async def read(self, pool: PoolId, after: Position, *, wait_ms: int, limit: int = 256) -> Sequence[StreamEntry]:
        """Waits at most 30 s, and holds a connection of its own meanwhile."""
        key = self._keys.events(pool)
        wait_ms = min(wait_ms, _LONGEST_WAIT_MS)
        async with self._calls.answer(self._calls.timeout_s + wait_ms / 1000):
            # A wait of 0 would mean for ever.
            reply = await self._client.xread({key: after}, count=limit, block=wait_ms or None)
            found: Sequence[tuple[bytes, dict[bytes, bytes] | None]] = reply[0][1] if reply else ()
            if not found and order(await self._tail(key)) < order(after):
                raise self._broken_off(pool)
            if len(found) == limit and after != START:
                # Entries are dropped from the front, and only where more than this came since `after`.
                first = await self._client.xrange(key, count=1)
                if first and order(_position(first[0][0])) > order(after):
                    raise self._broken_off(pool)
        entries, bad = [], []
        for name, fields in found:
            try:
                entries.append(decode_entry(_position(name), (fields or {})[b"c"]))
            except (ValueError, KeyError):
                bad.append(f"{key} {name!r}")
        self._calls.report(bad)
        return entries

    async def held(self, pool: PoolId, holder: Holder, epoch: Epoch) -> HeldBlocks | None:
        name = cache_name(holder, epoch)
        for _ in range(_ATTEMPTS):
            before = await self._cache(pool, name)
            if before is None:
                return None
            blocks, bad = await self._blocks(pool, name, before)
            after = await self._cache(pool, name)
            if after is not None and after.generation == before.generation:
                self._calls.report(bad)
                return HeldBlocks(epoch, before.seq, blocks, after.digests, after.seq)
        raise StoreError(
            f"The blocks of {name} in the store {self._calls.address} were replaced {_ATTEMPTS} times while they were "
            "read; try again later."
        )

    async def stats(self, pool: PoolId) -> IndexStats:
        caches = []
        for name in await self._names(pool):
            try:
                holder, epoch = parse_cache_name(name)
            except ValueError:
                continue
            cache = await self._cache(pool, name.decode())
            if cache is None:
                continue
            slabs = [self._keys.slab(pool, name.decode(), cache.generation, n) for n in range(cache.slabs)]
            tiers = {
                tier: sum(each.blocks for bits, each in cache.digests.items() if bits & tier)
                for tier in (Tier.GPU, Tier.CPU, Tier.SSD)
            }
            memory = await self._memory([self._keys.cache(pool, name.decode()), *slabs])
            distinct = sum(each.blocks for each in cache.digests.values())
            caches.append(CacheStats(holder, epoch, cache.seq, tiers, distinct, 1 + len(slabs), memory))
        caches.sort(key=lambda cache: (cache.holder, cache.epoch))
        events = self._keys.events(pool)
        async with self._calls.answer():
            length = await self._client.xlen(events)
        return IndexStats(tuple(caches), length, await self._memory([events]))

    async def clear(self, pool: PoolId) -> int:
        removed = 0
        for name in await self._names(pool):
            text = name.decode(errors="replace")
            cache = await self._cache(pool, text)
            slabs = cache.slabs if cache is not None else 0
            generation = cache.generation if cache is not None else 0
            keys = [self._keys.slab(pool, text, generation, n) for n in range(slabs)]
            # The hash first: without it no writer adds a slab.
            removed += await self._unlink([self._keys.cache(pool, text), *keys])
        return removed + await self._unlink([self._keys.caches(pool), self._keys.events(pool)])

    async def close(self) -> None:
        await self._calls.close()

    async def _tail(self, key: str) -> Position:
        newest = await self._client.xrevrange(key, count=1)
        return _position(newest[0][0]) if newest else START

    async def _names(self, pool: PoolId) -> Sequence[bytes]:
        async with self._calls.answer():
            names: Sequence[bytes] = await self._client.zrange(self._keys.caches(pool), 0, -1)
        return names

    async def _cache(self, pool: PoolId, name: str) -> _Cache | None:
        key = self._keys.cache(pool, name)
        async with self._calls.answer():
            fields = await self._client.hmget(key, "gen", "seq", "slabs", "digests")
        if None in fields:
            return None
        try:
            return _Cache(int(fields[0]), int(fields[1]), int(fields[2]), decode_digests(fields[3]))
        except ValueError:
            self._calls.report([key])
            return None

    async def _blocks(self, pool: PoolId, name: str, cache: _Cache) -> tuple[dict[int, Packed], list[str]]:
        """The blocks in a cache's slabs, and which slabs could not be read. One that is gone holds nothing: its writer
        notices when it next writes there or renews it."""
        found: dict[int, list[Packed]] = {}
        bad: list[str] = []
        for start in range(0, cache.slabs, _SLABS_PER_CALL):
            numbers = range(start, min(start + _SLABS_PER_CALL, cache.slabs))
            keys = [self._keys.slab(pool, name, cache.generation, n) for n in numbers]
            async with self._calls.answer(), self._client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.get(key)
                replies = await execute(pipe)
            for key, slab in zip(keys, replies, strict=True):
                if slab is None:
                    continue
                try:
                    if isinstance(slab, ResponseError):
                        raise ValueError("a key of another type")
                    blocks_of_slab(slab, found)
                except ValueError:
                    bad.append(key)
        return {bits: b"".join(parts) for bits, parts in found.items()}, bad

    async def _memory(self, keys: Sequence[str]) -> int:
        """Bytes that the store says the keys take; 0 where its user may not ask."""
        total = 0
        for start in range(0, len(keys), _KEYS_PER_CALL):
            async with self._calls.answer(), self._client.pipeline(transaction=False) as pipe:
                for key in keys[start : start + _KEYS_PER_CALL]:
                    pipe.memory_usage(key)
                replies: list[Any] = await pipe.execute(raise_on_error=False)
            if any(isinstance(reply, ResponseError) for reply in replies):
                return 0
            total += sum(reply for reply in replies if isinstance(reply, int))
        return total

    async def _unlink(self, keys: Sequence[str]) -> int:
        removed = 0
        for start in range(0, len(keys), _KEYS_PER_CALL):
            async with self._calls.answer():
                removed += await self._client.unlink(*keys[start : start + _KEYS_PER_CALL])
        return removed

    def _broken_off(self, pool: PoolId) -> IndexLost:
        return IndexLost(
            f"The block events of pool {pool} in the store {self._calls.address} do not go on from where they were "
            "read last; the index must be read anew."
        )


def _position(name: bytes) -> Position:
    return Position(name.decode())
