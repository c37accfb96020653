"""The block index in this process's memory. It keeps every rule of `block_index`; "the store" is a `MemoryStore`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import islice

from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.errors import IndexLost
from vllm_pd.state.base import Epoch, PoolId
from vllm_pd.state.block_codec import digest_of, order, pieces
from vllm_pd.state.block_index import (
    START,
    BlockChange,
    BlockWriter,
    CacheStats,
    HeldBlocks,
    Holder,
    IndexStats,
    Packed,
    Position,
    StreamEntry,
    Tier,
)
from vllm_pd.state.keys import cache_name, check_namespace
from vllm_pd.state.memory_store import MemoryCache, MemoryStore, MemoryStream, Namespace

_TIERS = (Tier.GPU, Tier.CPU, Tier.SSD)


class MemoryBlockWriter:
    """Implements `BlockWriter`; made by `MemoryBlockIndex.writer`."""

    def __init__(
        self, store: MemoryStore, namespace: str, pool: PoolId, holder: Holder, epoch: Epoch, ttl_ms: int
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._pool = pool
        self._holder = holder
        self._epoch = epoch
        self._ttl_ms = ttl_ms
        self._seq = 0
        self._known = False

    async def write(self, changed: Mapping[int, Packed]) -> None:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            self._write(space, self._cache(space), changed)

    async def replace(self, held: Mapping[int, Packed]) -> None:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            key = (self._pool, self._holder, self._epoch)
            stored = space.caches.get(key)
            self._seq = max(self._seq, stored.seq if stored is not None else 0) + 1
            cache = space.caches[key] = MemoryCache(self._seq, self._store.now_ms() + self._ttl_ms)
            self._announce(space, BlockChange(self._seq, True, {}))
            self._write(space, cache, {bits: packed for bits, packed in held.items() if bits})
            for pool, holder, epoch in list(space.caches):
                if (pool, holder) == (self._pool, self._holder) and epoch < self._epoch:
                    del space.caches[(pool, holder, epoch)]
            self._known = True

    async def renew(self, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        with self._store.lock:
            cache = self._cache(self._store.namespace(self._namespace))
            cache.ends = self._store.now_ms() + ttl_ms

    async def remove(self) -> None:
        self._known = False
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            stored = space.caches.pop((self._pool, self._holder, self._epoch), None)
            if stored is not None:
                self._seq = max(self._seq, stored.seq) + 1
                self._announce(space, BlockChange(self._seq, True, {}))

    def _cache(self, space: Namespace) -> MemoryCache:
        """The cache as this writer left it."""
        cache = space.caches.get((self._pool, self._holder, self._epoch))
        if not self._known or cache is None or cache.seq != self._seq:
            self._known = False
            raise IndexLost(
                f"The store does not hold the blocks that {cache_name(self._holder, self._epoch)} wrote; they must be "
                "announced again."
            )
        return cache

    def _write(self, space: Namespace, cache: MemoryCache, changed: Mapping[int, Packed]) -> None:
        for blocks in pieces(changed):
            self._seq += 1
            for bits, packed in blocks.items():
                for at in range(0, len(packed), KEY_BYTES):
                    if bits:
                        cache.blocks[packed[at : at + KEY_BYTES]] = bits
                    else:
                        cache.blocks.pop(packed[at : at + KEY_BYTES], None)
            self._announce(space, BlockChange(self._seq, False, blocks))
        cache.seq = self._seq

    def _announce(self, space: Namespace, change: BlockChange) -> None:
        space.stream(self._pool).append(lambda position: StreamEntry(position, self._holder, self._epoch, change))


class MemoryBlockIndex:
    """Implements `BlockIndex` over a `MemoryStore`; never raises `StoreError` other than `IndexLost`."""

    def __init__(self, namespace: str, store: MemoryStore | None = None) -> None:
        self._namespace = check_namespace(namespace)
        self._store = store or MemoryStore()

    def writer(self, pool: PoolId, holder: Holder, epoch: Epoch, ttl_ms: int) -> BlockWriter:
        return MemoryBlockWriter(self._store, self._namespace, pool, holder, epoch, ttl_ms)

    async def tail(self, pool: PoolId) -> Position:
        with self._store.lock:
            stream = self._store.namespace(self._namespace).events.get(pool)
        return Position(f"{stream.last}-0") if stream is not None else START

    async def read(self, pool: PoolId, after: Position, *, wait_ms: int, limit: int = 256) -> Sequence[StreamEntry]:
        with self._store.lock:
            stream = self._stream(pool)
            found = self._after(pool, stream, after, limit)
            event = stream.waiters.join() if wait_ms and not found else None
        if event is None:
            return found
        await stream.waiters.wait(event, wait_ms)
        with self._store.lock:
            return self._after(pool, self._stream(pool), after, limit)

    async def held(self, pool: PoolId, holder: Holder, epoch: Epoch) -> HeldBlocks | None:
        with self._store.lock:
            cache = self._store.namespace(self._namespace).caches.get((pool, holder, epoch))
            if cache is None:
                return None
            lists: dict[int, list[bytes]] = {}
            for key, bits in cache.blocks.items():
                lists.setdefault(bits, []).append(key)
            seq = cache.seq
        blocks = {bits: b"".join(keys) for bits, keys in lists.items()}
        return HeldBlocks(epoch, seq, blocks, {bits: digest_of(packed) for bits, packed in blocks.items()}, seq)

    async def stats(self, pool: PoolId) -> IndexStats:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            caches = [
                CacheStats(
                    holder,
                    epoch,
                    cache.seq,
                    {tier: sum(1 for bits in cache.blocks.values() if bits & tier) for tier in _TIERS},
                    len(cache.blocks),
                    1,
                    sys.getsizeof(cache.blocks),
                )
                for (of, holder, epoch), cache in sorted(space.caches.items())
                if of == pool
            ]
            stream = space.events.get(pool)
        return IndexStats(tuple(caches), len(stream.entries) if stream is not None else 0, 0)

    async def clear(self, pool: PoolId) -> int:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            caches = [key for key in space.caches if key[0] == pool]
            for key in caches:
                del space.caches[key]
            stream = space.events.get(pool)
            if stream is not None:
                stream.entries.clear()
        return len(caches) + (stream is not None)

    async def close(self) -> None:
        return None

    def _stream(self, pool: PoolId) -> MemoryStream:
        """Call with the store's lock held."""
        return self._store.namespace(self._namespace).stream(pool)

    def _after(self, pool: PoolId, stream: MemoryStream, after: Position, limit: int) -> Sequence[StreamEntry]:
        """Call with the store's lock held."""
        number, _ = order(after)
        skipped = number + 1 - stream.first
        if number > stream.last or (after != START and skipped < 0):
            raise IndexLost(f"The block events of pool {pool} do not go on from where they were read last.")
        return list(islice(stream.entries, max(skipped, 0), max(skipped, 0) + limit))
