"""The writer's side of a cache's slabs: which slot each block has, and what to write after a change. Pure.

A block keeps its slot while it is held, and blocks that arrive together get neighbouring slots where there is room:
what changes is then a few stretches of bytes, however many blocks they are.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from vllm_pd.block_hash import KEY_BYTES, BlockKey
from vllm_pd.state.block_codec import SLOTS, xor_of
from vllm_pd.state.block_index import Digest, Packed

_NOWHERE = -1
# Stretches that lie closer than this are written as one: a command costs more than half a kilobyte in between.
_JOIN_SLOTS = 32
# One slot in so many is kept free, so that blocks which are replaced one by one still find stretches of free slots.
_SLACK = 8
# Bounded: a large cache has a hundred thousand free slots, of which a call needs few.
_FREE = re.compile(rb"\x00{1,4096}")


@dataclass(frozen=True, slots=True)
class SlabWrite:
    """What to write into one slab: (offset, bytes) each. A new slab does not exist yet or must be made anew."""

    slab: int
    new: bool
    stretches: tuple[tuple[int, bytes], ...]


class BlockSlots:
    """All blocks of one cache."""

    def __init__(self) -> None:
        self._slot: dict[BlockKey, int] = {}
        self._tiers = bytearray()
        self._keys = bytearray()
        self._cursor = 0
        self._written = 0
        """Slabs that a `SlabWrite` was made for."""
        self._counts = [0] * 8
        self._xors = [0] * 8
        self._dirty_keys: list[tuple[int, int]] = []
        self._dirty_tiers: list[int] = []

    def __len__(self) -> int:
        return len(self._slot)

    @property
    def slabs(self) -> int:
        return len(self._tiers) // SLOTS

    def digests(self) -> dict[int, Digest]:
        """Tier bits -> digest of the blocks for which exactly these bits hold."""
        return {bits: Digest(self._counts[bits], self._xors[bits]) for bits in range(1, 8) if self._counts[bits]}

    def apply(self, changed: Mapping[int, Packed]) -> None:
        """Take over the new tier bits of some blocks."""
        for bits, packed in changed.items():
            keys = [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
            if bits == 0:
                self._free(keys)
                continue
            fresh = dict.fromkeys(keys)
            known = [key for key in fresh if key in self._slot]
            for key in known:
                del fresh[key]
            if known:
                self._set_tiers(known, [self._slot[key] for key in known], bits)
            if fresh:
                self._place(list(fresh), bits)

    def take_writes(self) -> list[SlabWrite]:
        """What the slabs need to be as this is, since the last call."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for start, end in _joined(self._dirty_keys):
            while start < end:
                slab = start // SLOTS
                stop = min(end, (slab + 1) * SLOTS)
                spans.setdefault(slab, []).append((start, stop))
                start = stop
        edges: dict[int, tuple[int, int]] = {}
        dirty = sorted(self._dirty_tiers)
        at = 0
        while at < len(dirty):
            slab = dirty[at] // SLOTS
            after = bisect_left(dirty, (slab + 1) * SLOTS, at)
            edges[slab] = (dirty[at], dirty[after - 1])
            at = after
        self._dirty_keys, self._dirty_tiers = [], []
        new = range(self._written, self.slabs)
        self._written = self.slabs
        writes = []
        for slab in sorted(edges.keys() | spans.keys() | set(new)):
            first = slab * SLOTS
            stretches = []
            if slab in edges:
                low, high = edges[slab]
                stretches.append((low - first, bytes(self._tiers[low : high + 1])))
            for start, end in spans.get(slab, ()):
                data = bytes(self._keys[start * KEY_BYTES : end * KEY_BYTES])
                stretches.append((SLOTS + (start - first) * KEY_BYTES, data))
            writes.append(SlabWrite(slab, slab in new, tuple(stretches)))
        return writes

    def _free(self, keys: list[BlockKey]) -> None:
        pop = self._slot.pop
        places = [pop(key, _NOWHERE) for key in keys]
        if _NOWHERE in places:
            keys = [key for key, slot in zip(keys, places, strict=True) if slot != _NOWHERE]
            places = [slot for slot in places if slot != _NOWHERE]
        self._set_tiers(keys, places, 0)

    def _set_tiers(self, keys: list[BlockKey], places: list[int], bits: int) -> None:
        """State the tiers of blocks that have slots (or just had them)."""
        tiers = self._tiers
        was = bytes([tiers[slot] for slot in places])
        for slot in places:
            tiers[slot] = bits
        self._dirty_tiers += places
        for old in set(was):
            these = keys if was.count(old) == len(was) else [k for k, b in zip(keys, was, strict=True) if b == old]
            self._count(these, old, -1)
            if bits:
                self._count(these, bits, 1)

    def _place(self, keys: list[BlockKey], bits: int) -> None:
        """Give slots to blocks that have none."""
        self._make_room(len(keys))
        left = iter(keys)
        count = len(keys)
        while count:
            start, end = self._next_free(count)
            here = list(islice(left, end - start))
            self._keys[start * KEY_BYTES : end * KEY_BYTES] = b"".join(here)
            self._tiers[start:end] = bytes((bits,)) * (end - start)
            self._slot.update(zip(here, range(start, end), strict=True))
            self._dirty_keys.append((start, end))
            self._dirty_tiers += (start, end - 1)
            # The stretch may cross slabs; each slab in between is dirty at its edges too.
            for slab in range(start // SLOTS + 1, (end - 1) // SLOTS + 1):
                self._dirty_tiers += (slab * SLOTS - 1, slab * SLOTS)
            count -= end - start
        self._count(keys, bits, 1)

    def _make_room(self, count: int) -> None:
        needed = (len(self._slot) + count) * _SLACK // (_SLACK - 1)
        while len(self._tiers) < needed:
            self._tiers += bytes(SLOTS)
            self._keys += bytes(SLOTS * KEY_BYTES)

    def _next_free(self, most: int) -> tuple[int, int]:
        """The next stretch of free slots behind the cursor, at most so long. There is one: `_make_room` saw to it."""
        start = self._tiers.find(0, self._cursor)
        if start < 0:
            start = self._tiers.index(0)
        free = _FREE.match(self._tiers, start)
        assert free is not None
        end = min(free.end(), start + most)
        self._cursor = end
        return start, end

    def _count(self, keys: list[BlockKey], bits: int, sign: int) -> None:
        self._counts[bits] += sign * len(keys)
        # XOR takes out what it put in.
        self._xors[bits] ^= xor_of(b"".join(keys))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ordered, and near ones as one."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if out and start - out[-1][1] <= _JOIN_SLOTS:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out
