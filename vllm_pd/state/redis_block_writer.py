"""Writing one cache's blocks to Redis.

Changes go out as one script call for up to `_CALL_CHANGES` of them: stretches of bytes into slabs, and one entry of
the stream per change. The writer knows what every slab holds, so nothing is read back, and a store that lost or
changed anything shows in a number that is not the expected one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice

from vllm_pd.errors import IndexLost, StoreError
from vllm_pd.state import block_scripts
from vllm_pd.state.base import Epoch, PoolId
from vllm_pd.state.block_codec import SLAB_BYTES, encode_digests, encode_entry, pieces
from vllm_pd.state.block_index import BlockChange, Holder, Packed
from vllm_pd.state.block_slots import BlockSlots
from vllm_pd.state.keys import Keys, cache_name, parse_cache_name
from vllm_pd.state.redis_calls import RedisCalls

STREAM_ENTRIES = 32_768
"""About how many changes a pool's stream keeps: 64 MB at most, and some seconds of what a hundred busy workers do."""
_CALL_CHANGES = 32
_ATTEMPTS = 3
_RENEW_SLABS = 256
_UNLINK_KEYS = 256
# Keys get this many times the time that they must live: a slab is renewed when less than that time is left, once in a
# while and not at every heartbeat.
_LIFETIME = 2


@dataclass(frozen=True, slots=True)
class _Stored:
    """A cache as the store has it: its `seq` as it stands there, the newest change ever, and the keys of its slabs."""

    seq: bytes | None
    number: int
    slabs: Sequence[str]


class RedisBlockWriter:
    """Implements `BlockWriter`. Made by `RedisBlockIndex.writer`."""

    def __init__(self, calls: RedisCalls, keys: Keys, pool: PoolId, holder: Holder, epoch: Epoch, ttl_ms: int) -> None:
        self._calls = calls
        self._keys = keys
        self._pool = pool
        self._holder = holder
        self._epoch = epoch
        self._ttl_ms = ttl_ms
        self._name = cache_name(holder, epoch)
        self._cache = keys.cache(pool, self._name)
        self._events = keys.events(pool)
        self._caches = keys.caches(pool)
        self._slots = BlockSlots()
        self._generation = 0
        self._seq = 0
        """The newest change that the store has confirmed."""
        self._used = 0
        """The newest change that was ever sent. Readers may have seen it although the store forgot it before we heard
        of it, and would take another change of that number for one that they know."""
        self._known = False
        """Whether the store holds what `_slots` says."""
        self._ends: list[float] = []
        """When each slab ends at the earliest, seconds of this process's clock."""

    async def write(self, changed: Mapping[int, Packed]) -> None:
        if not self._known:
            raise self._lost()
        async with self._all_or_unknown():
            await self._write(changed)

    async def replace(self, held: Mapping[int, Packed]) -> None:
        async with self._all_or_unknown():
            before = await self._begin()
            await self._unlink(before)
            await self._write({bits: packed for bits, packed in held.items() if bits})
            await self._drop_older_epochs()

    async def renew(self, ttl_ms: int) -> None:
        if not self._known:
            raise self._lost()
        self._ttl_ms = ttl_ms
        now = time.monotonic()
        due = [slab for slab, ends in enumerate(self._ends) if ends < now + ttl_ms / 1000]
        async with self._all_or_unknown():
            for start in range(0, max(len(due), 1), _RENEW_SLABS):
                part = due[start : start + _RENEW_SLABS]
                keys = [self._cache, self._events, self._caches, *map(self._slab, part)]
                async with self._calls.answer():
                    kept = await block_scripts.RENEW.run(
                        self._calls.client, keys, (self._seq, _LIFETIME * ttl_ms, self._name)
                    )
                if not kept:
                    raise self._lost()
                for slab in part:
                    self._ends[slab] = now + _LIFETIME * ttl_ms / 1000

    async def remove(self) -> None:
        self._known = False
        for _ in range(_ATTEMPTS):
            stored = await self._stored()
            if stored.seq is None:
                return
            self._used = stored.number + 1
            entry = self._entry(BlockChange(self._used, True, {}))
            args = (stored.seq, self._name, _LIFETIME * self._ttl_ms, STREAM_ENTRIES, entry)
            async with self._calls.answer():
                removed = await block_scripts.REMOVE.run(
                    self._calls.client, (self._cache, self._events, self._caches), args
                )
            if removed:
                await self._unlink(stored.slabs)
                return
        raise self._contended()

    async def _begin(self) -> Sequence[str]:
        """Start an empty generation; the slabs of the one before."""
        for _ in range(_ATTEMPTS):
            stored = await self._stored()
            seq = stored.number + 1
            self._generation += 1
            self._used = seq
            entry = self._entry(BlockChange(seq, True, {}))
            args = (stored.seq or b"", seq, self._generation, _LIFETIME * self._ttl_ms, self._name)
            async with self._calls.answer():
                begun = await block_scripts.BEGIN.run(
                    self._calls.client,
                    (self._cache, self._events, self._caches),
                    (*args, STREAM_ENTRIES, entry),
                )
            if begun:
                self._seq = seq
                self._slots = BlockSlots()
                self._ends = []
                return stored.slabs
        raise self._contended()

    async def _write(self, changed: Mapping[int, Packed]) -> None:
        changes = pieces(changed)
        while part := list(islice(changes, _CALL_CHANGES)):
            seq = self._seq
            entries = []
            for blocks in part:
                seq += 1
                entries.append(self._entry(BlockChange(seq, False, blocks)))
                self._slots.apply(blocks)
            writes = self._slots.take_writes()
            args: list[object] = [
                self._seq,
                seq,
                self._slots.slabs,
                encode_digests(self._slots.digests()),
                SLAB_BYTES,
                _LIFETIME * self._ttl_ms,
                STREAM_ENTRIES,
                len(entries),
                *entries,
            ]
            for write in writes:
                args += (int(write.new), len(write.stretches))
                for stretch in write.stretches:
                    args += stretch
            keys = [self._cache, self._events, *(self._slab(write.slab) for write in writes)]
            ends = time.monotonic() + _LIFETIME * self._ttl_ms / 1000
            self._used = seq
            async with self._calls.answer():
                written = await block_scripts.WRITE.run(self._calls.client, keys, args)
            if not written:
                raise self._lost()
            self._seq = seq
            self._ends += [ends] * (self._slots.slabs - len(self._ends))

    async def _stored(self) -> _Stored:
        """What the store has of this epoch. `_generation` is then at least the stored one."""
        async with self._calls.answer():
            seq, *others = await self._calls.client.hmget(self._cache, "seq", "gen", "slabs")
        try:
            number, generation, slabs = int(seq), int(others[0]), int(others[1])
        except (TypeError, ValueError):
            # Absent, or no hash of ours: it gives way.
            return _Stored(seq, self._used, ())
        self._generation = max(self._generation, generation)
        keys = [self._keys.slab(self._pool, self._name, generation, n) for n in range(slabs)]
        return _Stored(seq, max(number, self._used), keys)

    async def _drop_older_epochs(self) -> None:
        """Keys that an earlier start of this worker left would end by themselves, but only in minutes."""
        async with self._calls.answer():
            names: Sequence[bytes] = await self._calls.client.zrange(self._caches, 0, -1)
        for name in names:
            try:
                holder, epoch = parse_cache_name(name)
            except ValueError:
                continue
            if holder == self._holder and epoch < self._epoch:
                old = RedisBlockWriter(self._calls, self._keys, self._pool, holder, epoch, self._ttl_ms)
                await old.remove()
                async with self._calls.answer():
                    await self._calls.client.zrem(self._caches, name)

    async def _unlink(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _UNLINK_KEYS):
            async with self._calls.answer():
                await self._calls.client.unlink(*keys[start : start + _UNLINK_KEYS])

    @asynccontextmanager
    async def _all_or_unknown(self) -> AsyncIterator[None]:
        """Whatever ends a call early, cancellation included, leaves it unknown what the store holds."""
        self._known = False
        yield
        self._known = True

    def _slab(self, number: int) -> str:
        return self._keys.slab(self._pool, self._name, self._generation, number)

    def _entry(self, change: BlockChange) -> bytes:
        return encode_entry(self._holder, self._epoch, change)

    def _lost(self) -> IndexLost:
        return IndexLost(
            f"The store {self._calls.address} does not hold the blocks that {self._name} wrote; they must be announced "
            "again."
        )

    def _contended(self) -> StoreError:
        return StoreError(
            f"Somebody else writes the blocks of {self._name} to the store {self._calls.address}; let only one process "
            "serve under that address."
        )
