"""Which caches hold which leading blocks of a prompt: one router's mirror of one pool's block index."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from vllm_pd.block_hash import KEY_BYTES, BlockKey
from vllm_pd.routing.model import Overlap
from vllm_pd.state.block_index import Holder, Packed, Tier

_BITS = 3
"""Bits per cache in a mask: one for each tier."""
_ALL_TIERS = 7
_FASTEST = (0, 1, 2, 1, 4, 1, 2, 1)
"""Tier bits -> the fastest of those tiers."""
_OVERLAP_FIELD = (0, 0, 1, 0, 2)
"""A single tier -> its place in `Overlap`."""
_SPARE_KEYS = 256
"""Keys in a cache's log beyond twice its blocks before the log is rewritten."""
_FIRST_KEYS, _MOST_KEYS = 16, 256
"""Keys of a prompt that are looked up together: few at first, since most prompts that are new differ early."""
_MANY_BITS = 8
"""Caches that stop at one block are taken together from so many on."""
_GROUPS = 1024
"""Masks whose caches are remembered."""
_SPARE_MASKS = 1024
"""Masks nobody uses any more that may be kept before they are looked for."""


class _Cache:
    """What the index keeps of one holder."""

    __slots__ = ("blocks", "holder", "log", "on_tier", "shift")

    def __init__(self, holder: Holder, shift: int) -> None:
        self.holder = holder
        self.shift = shift
        self.blocks = 0
        self.on_tier = [0] * (_ALL_TIERS + 1)
        """Tier bits -> blocks with exactly these."""
        self.log = bytearray()
        """Keys added since the last rewrite, packed: every block held is in it, some of it is stale."""

    def forget(self) -> None:
        self.blocks = 0
        self.on_tier = [0] * (_ALL_TIERS + 1)
        self.log = bytearray()


class PrefixIndex:
    """Block key -> tiers of every cache that holds it. In memory, for one thread.

    A key's caches are one integer, three bits for each; equal integers are one object. Each cache has a log of its own
    keys, so that clearing it costs its own blocks. A block held by one cache takes about 100 bytes in all.
    """

    def __init__(self) -> None:
        self._masks: dict[BlockKey, int] = {}
        self._interned: dict[int, int] = {}
        self._purge_at = _SPARE_MASKS
        self._caches: dict[Holder, _Cache] = {}
        self._slots: list[_Cache | None] = []
        self._free_slots: list[int] = []
        self._groups: dict[int, dict[int, dict[Holder, None]]] = {}
        """Mask -> its caches by fastest tier. Dicts, since copying one does not hash its keys."""

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._masks)

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._caches

    def holders(self) -> Iterator[Holder]:
        """Every known cache."""
        return iter(self._caches)

    def add(self, holder: Holder) -> None:
        """Make a cache known, empty. Idempotent: one that is known keeps what it holds."""
        if holder in self._caches:
            return
        if self._free_slots:
            # The lowest: masks stay as short as the number of caches allows.
            slot = heapq.heappop(self._free_slots)
        else:
            slot = len(self._slots)
            self._slots.append(None)
        self._slots[slot] = self._caches[holder] = _Cache(holder, slot * _BITS)
        self._groups.clear()

    def remove(self, holder: Holder) -> None:
        """Forget a cache, at the cost of its own blocks. Idempotent."""
        cache = self._caches.pop(holder, None)
        if cache is None:
            return
        self._drop_blocks(cache)
        slot = cache.shift // _BITS
        self._slots[slot] = None
        heapq.heappush(self._free_slots, slot)

    def clear(self, holder: Holder) -> None:
        """The cache holds nothing any more. Costs its own blocks. Raises `KeyError` for an unknown one."""
        self._drop_blocks(self._caches[holder])

    def drain(self, holder: Holder, limit: int) -> bool:
        """A part of `clear`, for a cache too large to clear at once: whether it is empty now.

        Lets go of at most `limit` of its blocks, none in particular. Raises `KeyError` for an unknown cache.
        """
        cache = self._caches[holder]
        cut = max(0, len(cache.log) - limit * KEY_BYTES)
        self._release(cache, cache.log[cut:])
        del cache.log[cut:]
        return not cache.log

    def apply(self, holder: Holder, blocks: Mapping[int, Packed]) -> None:
        """State the tier bits (0: gone) of some blocks. Applying it twice changes nothing.

        Raises `KeyError` for an unknown cache, `ValueError` for bits no tier has or a key that is cut off.
        """
        cache = self._caches[holder]
        for bits, packed in blocks.items():
            if not 0 <= bits <= _ALL_TIERS:
                raise ValueError(f"Tier bits {bits} name no tier; the writer is of a newer version")
            if len(packed) % KEY_BYTES:
                raise ValueError(f"{len(packed)} bytes of packed keys are not a multiple of {KEY_BYTES}")
            if bits:
                self._hold(cache, bits, packed)
            else:
                self._release(cache, packed)
        if len(cache.log) > (2 * cache.blocks + _SPARE_KEYS) * KEY_BYTES:
            cache.log = bytearray().join(self.held(holder))
        if len(self._interned) > self._purge_at:
            self._purge_masks()

    def lookup(self, keys: Sequence[BlockKey]) -> dict[Holder, Overlap]:
        """The leading run of `keys` in each cache that holds the first; each block counts on its fastest tier.

        Costs one dictionary read per block until no cache follows, and under a microsecond where a cache stops or
        changes tier.
        """
        get, total = self._masks.get, len(keys)
        mask = get(keys[0]) if total else None
        if mask is None:
            return {}
        run = _Run(self._slots, self._groups, _occupied(mask, len(self._slots)) * _ALL_TIERS)
        start, size = 1, _FIRST_KEYS
        while start < total:
            found = list(map(get, keys[start : start + size]))
            # Most blocks are held as the one before is, and counting those is far cheaper than looking at each. As a
            # rule they come first, and what is not held comes last.
            same = found.count(mask)
            if same != len(found):
                skipped = same if found[:same].count(mask) == same else 0
                for position, following in enumerate(found[skipped:], start + skipped):
                    if following is mask:
                        continue
                    if following is None:
                        run.step(mask, 0, position)
                        return run.overlaps
                    if (mask ^ following) & run.alive:
                        run.step(mask, following, position)
                        if not run.alive:
                            return run.overlaps
                    mask = following
            start += size
            size = min(4 * size, _MOST_KEYS)
        run.step(mask, 0, total)
        return run.overlaps

    def count(self, holder: Holder) -> dict[Tier, int]:
        """Blocks per tier; a block on two tiers counts on both. Raises `KeyError` for an unknown cache."""
        on_tier = self._caches[holder].on_tier
        return {
            tier: sum(n for bits, n in enumerate(on_tier) if bits & tier) for tier in (Tier.GPU, Tier.CPU, Tier.SSD)
        }

    def blocks(self, holder: Holder) -> int:
        """Blocks on any tier. Raises `KeyError` for an unknown cache."""
        return self._caches[holder].blocks

    def held(self, holder: Holder) -> dict[BlockKey, int]:
        """Every block of a cache with its tier bits. Costs its own blocks. Raises `KeyError` for an unknown cache."""
        cache = self._caches[holder]
        found: dict[BlockKey, int] = {}
        for key in _keys(cache.log):
            bits = self._masks.get(key, 0) >> cache.shift & _ALL_TIERS
            if bits:
                found[key] = bits
        return found

    def _hold(self, cache: _Cache, bits: int, packed: Packed) -> None:
        masks, shift, intern = self._masks, cache.shift, self._interned.setdefault
        get = masks.get
        own, now = _ALL_TIERS << shift, bits << shift
        was = [0] * (_ALL_TIERS + 1)
        # Blocks of one batch mostly come from one state, so the last step is worth remembering.
        last_old, last_new, last_bits = 0, intern(now, now), 0
        fresh: list[BlockKey] = []
        for start in range(0, len(packed), KEY_BYTES):
            key = packed[start : start + KEY_BYTES]
            old = get(key, 0)
            if old is not last_old:
                last_old, last_bits = old, old >> shift & _ALL_TIERS
                last_new = old & ~own | now
                last_new = intern(last_new, last_new)
            masks[key] = last_new
            was[last_bits] += 1
            if not last_bits:
                fresh.append(key)
        on_tier = cache.on_tier
        on_tier[bits] += len(packed) // KEY_BYTES
        for old_bits in range(1, len(was)):
            on_tier[old_bits] -= was[old_bits]
        if fresh:
            cache.blocks += len(fresh)
            cache.log += packed if len(fresh) * KEY_BYTES == len(packed) else b"".join(fresh)

    def _release(self, cache: _Cache, packed: Packed | bytearray) -> None:
        masks, shift, intern = self._masks, cache.shift, self._interned.setdefault
        get = masks.get
        own, on_tier = _ALL_TIERS << shift, cache.on_tier
        last_old, last_new, last_bits = 0, 0, 0
        for key in _keys(packed):
            old = get(key, 0)
            if old is not last_old:
                last_old, last_bits = old, old >> shift & _ALL_TIERS
                last_new = old & ~own
                if last_new:
                    last_new = intern(last_new, last_new)
            if not last_bits:
                continue
            if last_new:
                masks[key] = last_new
            else:
                del masks[key]
            on_tier[last_bits] -= 1
            cache.blocks -= 1

    def _drop_blocks(self, cache: _Cache) -> None:
        self._release(cache, cache.log)
        cache.forget()

    def _purge_masks(self) -> None:
        """Forget masks that no block has. The next time is so far away that a block is looked at a few times at most
        for every mask that was new."""
        self._interned = {mask: mask for mask in self._masks.values()}
        self._purge_at = len(self._interned) + max(_SPARE_MASKS, len(self._masks) // 8)


def _keys(packed: Packed | bytearray) -> Iterator[BlockKey]:
    packed = bytes(packed)
    return (packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES))


class _Run:
    """A walk along a prompt. Work is done only for a cache that stops or changes tier, not for every block."""

    __slots__ = ("_earlier", "_groups", "_slots", "alive", "overlaps")

    def __init__(
        self, slots: list[_Cache | None], groups: dict[int, dict[int, dict[Holder, None]]], alive: int
    ) -> None:
        self._slots = slots
        self._groups = groups
        self._earlier: dict[int, list[int]] = {}
        """Slot of a cache that changed tier -> blocks on GPU, CPU, SSD before the present stretch; where it began."""
        self.alive = alive
        """All bits of each cache that held every block so far."""
        self.overlaps: dict[Holder, Overlap] = {}

    def step(self, mask: int, following: int, position: int) -> None:
        """The blocks before `position` had `mask`, the one there has `following`."""
        slots, overlaps, earlier, alive = self._slots, self.overlaps, self._earlier, self.alive
        changed = (mask ^ following) & alive
        if not earlier and changed.bit_count() >= _MANY_BITS:
            alive &= _occupied(following, len(slots)) * _ALL_TIERS
            for tier, holders in self._holders(mask & self.alive & ~alive).items():
                overlaps.update(dict.fromkeys(holders, _whole_overlap(tier, position)))
            changed &= alive
        while changed:
            # From the top: cutting the number off there makes it shorter each time.
            slot = (changed.bit_length() - 1) // _BITS
            shift = slot * _BITS
            changed &= (1 << shift) - 1
            before = _FASTEST[mask >> shift & _ALL_TIERS]
            after = _FASTEST[following >> shift & _ALL_TIERS]
            if before == after:
                continue
            stretches = earlier.get(slot)
            if after:
                if stretches is None:
                    stretches = earlier[slot] = [0, 0, 0, 0]
                stretches[_OVERLAP_FIELD[before]] += position - stretches[3]
                stretches[3] = position
                continue
            alive ^= _ALL_TIERS << shift
            cache = slots[slot]
            assert cache is not None, "a mask names a cache that was removed"
            if stretches is None:
                overlaps[cache.holder] = _whole_overlap(before, position)
            else:
                stretches[_OVERLAP_FIELD[before]] += position - stretches[3]
                overlaps[cache.holder] = Overlap(*stretches[:3])
        self.alive = alive

    def _holders(self, mask: int) -> dict[int, dict[Holder, None]]:
        """The caches of a mask, by their fastest tier. Prompts that begin alike end in the same masks again."""
        found = self._groups.get(mask)
        if found is not None:
            return found
        if len(self._groups) >= _GROUPS:
            self._groups.clear()
        found = self._groups[mask] = {}
        for slot, cache in enumerate(self._slots):
            tier = _FASTEST[mask >> slot * _BITS & _ALL_TIERS]
            if tier:
                assert cache is not None, "a mask names a cache that was removed"
                found.setdefault(tier, {})[cache.holder] = None
        return found


@lru_cache(maxsize=4096)
def _whole_overlap(tier: int, blocks: int) -> Overlap:
    """All on one tier: most overlaps are, and making one takes ten times as long as finding it."""
    counts = [0, 0, 0]
    counts[_OVERLAP_FIELD[tier]] = blocks
    return Overlap(*counts)


def _occupied(mask: int, slots: int) -> int:
    """The lowest bit of every cache that has any."""
    lowest = ((1 << _BITS * slots) - 1) // _ALL_TIERS
    return (mask | mask >> 1 | mask >> 2) & lowest
