"""Which blocks there are and where: the only thing that makes bytes on a disk a block.

Used by the scheduler's thread and the store's own. The lock is held for dictionary updates only, a bounded number at a
time; asking whether a key is there takes no lock. Memory a block: about 190 bytes with vLLM's 36-byte keys.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from vllm_pd.kv_offload.segments.format import ALIGN, Entries, Identity

_PORTION = 256
"""Keys handled before the lock is let go: about 0.1 ms."""

_NUMBER_BITS = 24
"""Of a place, for the block's number in its segment; the rest is the segment. One integer a block, not an object."""
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
_ABSENT = -1

_HOTTEST = 255


class Segment:
    """A segment file and the blocks that were ever put in it. `Index` keeps counts and size, the writer the rest.

    Attributes:
        identity: of the file.
        path: of the file.
        size: bytes it takes of the budget.
        sealed: it gets no more blocks.
        entries: its blocks; the number of a block is its position here.
        heat: for each block, how often it was used; capped, and halved when the block is written again.
        live: how many of its blocks the index points to.
        hot: how many of those were used.
        used_at: id of the segment that was being written when a block of this one was last used: time, in segments.
        pins: blocks that loads are going to read from it.
    """

    __slots__ = (
        "entries",
        "heat",
        "hot",
        "identity",
        "live",
        "path",
        "pins",
        "sealed",
        "size",
        "slot",
        "used_at",
    )

    def __init__(self, identity: Identity, path: Path, size: int, slot: int) -> None:
        self.identity = identity
        self.path = path
        self.size = size
        self.slot = slot
        self.sealed = False
        self.entries = Entries.empty()
        self.heat = bytearray()
        self.live = 0
        self.hot = 0
        self.used_at = identity.segment_id
        self.pins = 0

    @property
    def id(self) -> int:
        return self.identity.segment_id

    def offset(self, number: int) -> int:
        """Where in the file block `number` begins, in bytes."""
        return self.entries.offsets[number] * ALIGN

    def __repr__(self) -> str:
        return f"Segment({self.id}, live={self.live}/{len(self.entries.keys)}, size={self.size})"


Place = tuple[Segment, int]
"""Where a block is: its segment and its number there."""

Group = tuple[Segment, list[int]]
"""Blocks of one segment, in the order of their numbers there."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where blocks were when they were asked for.

    Attributes:
        positions: of the keys that are stored, in the order in which the blocks lie on the disk.
        absent: positions of the others.
        groups: the same blocks as `positions`, in the same order.
    """

    positions: list[int]
    absent: list[int]
    groups: list[Group]

    def part(self, first: int, last: int) -> tuple[list[int], list[Group]]:
        """Positions and groups of the blocks from number `first` to `last` in their order."""
        if first == 0 and last >= len(self.positions):
            return self.positions, self.groups
        groups: list[Group] = []
        at = 0
        for segment, numbers in self.groups:
            if some := numbers[max(0, first - at) : max(0, last - at)]:
                groups.append((segment, some))
            at += len(numbers)
        return self.positions[first:last], groups


class Index:
    """Key -> place, and the changes that the store's user has not heard of yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[bytes, int] = {}
        self._segments: dict[int, Segment] = {}
        self._changes: dict[bytes, bool] = {}
        self._slots = 0
        self._clock = 0
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    @property
    def clock(self) -> int:
        """Id of the newest segment."""
        return self._clock

    def segments(self) -> list[Segment]:
        """Of this moment, oldest first."""
        with self._lock:
            return sorted(self._segments.values(), key=lambda segment: segment.id)

    @property
    def used_bytes(self) -> int:
        """Of all segments' files."""
        return self._used_bytes

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    def open_segment(self, identity: Identity, path: Path, size: int) -> Segment:
        """A segment without blocks."""
        with self._lock:
            segment = Segment(identity, path, size, self._slots)
            self._segments[self._slots] = segment
            self._slots += 1
            self._used_bytes += size
            self._clock = max(self._clock, segment.id)
        return segment

    def resize(self, segment: Segment, size: int) -> None:
        """Its file takes so many bytes now."""
        with self._lock:
            self._used_bytes += size - segment.size
            segment.size = size

    def add(self, segment: Segment, entries: Entries, heat: bytes | None = None) -> None:
        """Blocks that were just written to `segment`: the newest, so they take the place of older copies."""
        for first, portion in self._append(segment, entries, heat):
            for number, key in enumerate(portion, first):
                if (before := self._places.get(key)) is None:
                    self._changes[key] = True
                else:
                    self._leave(before)
                self._enter(key, segment, number)

    def adopt(self, segment: Segment, entries: Entries, pause: Callable[[], None]) -> int:
        """Blocks that were found on the disk: a key that is known already has a newer copy elsewhere.

        Args:
            pause: called, without the lock, after each portion: a million blocks must not hold up the engine.

        Returns:
            How many were new.
        """
        fresh = 0
        for first, portion in self._append(segment, entries, None, pause):
            for number, key in enumerate(portion, first):
                before = self._places.get(key)
                if before is None:
                    self._changes[key] = True
                    fresh += 1
                elif before >> _NUMBER_BITS == segment.slot:
                    # In one segment the later copy is the newer: the earlier one had turned out bad.
                    self._leave(before)
                else:
                    continue
                self._enter(key, segment, number)
        return fresh

    def locate(self, keys: Sequence[bytes]) -> Located:
        """Where each block is. Its segment is pinned once for it, until `unpin`."""
        groups: list[Group] = []
        with self._lock:
            places = [_ABSENT if place is None else place for place in map(self._places.get, keys)]
            positions = sorted(range(len(keys)), key=places.__getitem__)
            ordered = [places[position] for position in positions]
            at = missing = bisect_left(ordered, 0)
            while at < len(ordered):
                slot = ordered[at] >> _NUMBER_BITS
                end = bisect_left(ordered, slot + 1 << _NUMBER_BITS, at)
                segment = self._segments[slot]
                segment.pins += end - at
                groups.append((segment, [place & _NUMBER_MASK for place in ordered[at:end]]))
                at = end
        return Located(positions[missing:], positions[:missing], groups)

    def unpin(self, groups: Iterable[Group]) -> None:
        with self._lock:
            for segment, numbers in groups:
                segment.pins -= len(numbers)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Blocks that are in use; unknown keys are passed over."""
        with self._lock:
            for key in keys:
                place = self._places.get(key)
                if place is None:
                    continue
                segment, number = self._segments[place >> _NUMBER_BITS], place & _NUMBER_MASK
                heat = segment.heat[number]
                if heat == 0:
                    segment.hot += 1
                segment.heat[number] = min(heat + 1, _HOTTEST)
                segment.used_at = self._clock

    def forget(self, places: Iterable[Place]) -> int:
        """Blocks that are bad. One that is elsewhere by now stays. Returns how many left."""
        left = 0
        with self._lock:
            for segment, number in places:
                left += self._remove(segment, number)
        return left

    def live_blocks(self, segment: Segment) -> list[int]:
        """Numbers of its blocks that the index points to."""
        base = segment.slot << _NUMBER_BITS
        return [n for n, key in enumerate(segment.entries.keys) if self._places.get(key) == base | n]

    def empty(self, segment: Segment) -> int:
        """All blocks of a segment leave; loads that are pinned to it may still read. Returns how many left."""
        left = 0
        for first in range(0, len(segment.entries.keys), _PORTION):
            with self._lock:
                for number in range(first, min(first + _PORTION, len(segment.entries.keys))):
                    left += self._remove(segment, number)
        return left

    def drop(self, segment: Segment) -> bool:
        """Forget an emptied segment, unless a load is pinned to it: then False, and it must be kept readable."""
        with self._lock:
            if segment.pins or segment.live:
                return False
            if self._segments.pop(segment.slot, None) is not None:
                self._used_bytes -= segment.size
        return True

    def take_changes(self, limit: int) -> tuple[list[bytes], list[bytes]]:
        """Up to `limit` keys that came or went since this was last asked, the last state of each: (came, went)."""
        with self._lock:
            taken = dict(islice(self._changes.items(), limit))
            for key in taken:
                del self._changes[key]
        return [key for key, there in taken.items() if there], [key for key, there in taken.items() if not there]

    def _append(
        self, segment: Segment, entries: Entries, heat: bytes | None, pause: Callable[[], None] | None = None
    ) -> Iterator[tuple[int, list[bytes]]]:
        """Portions of keys with the number of their first, each with the lock held while the caller has it."""
        count = len(entries.keys)
        with self._lock:
            base = len(segment.entries.keys)
            if base + count > _NUMBER_MASK:
                raise ValueError(f"{base + count} blocks in a segment are too many")
            segment.entries.extend(entries)
            segment.heat.extend(bytes(count) if heat is None else heat)
        for first in range(0, count, _PORTION):
            with self._lock:
                yield base + first, entries.keys[first : first + _PORTION]
            if pause is not None:
                pause()

    def _enter(self, key: bytes, segment: Segment, number: int) -> None:
        self._places[key] = segment.slot << _NUMBER_BITS | number
        segment.live += 1
        if segment.heat[number]:
            segment.hot += 1

    def _leave(self, place: int) -> None:
        segment = self._segments[place >> _NUMBER_BITS]
        segment.live -= 1
        if segment.heat[place & _NUMBER_MASK]:
            segment.hot -= 1

    def _remove(self, segment: Segment, number: int) -> int:
        key, place = segment.entries.keys[number], segment.slot << _NUMBER_BITS | number
        if self._places.get(key) != place:
            return 0
        del self._places[key]
        self._leave(place)
        self._changes[key] = False
        return 1
