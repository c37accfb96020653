"""Which blocks there are, and what is told of it."""

from __future__ import annotations

import sys
import tracemalloc
from array import array
from pathlib import Path

from tests.unit.kv_offload.segments.rig import key, pinned
from vllm_pd.kv_offload.segments.format import Entries, Identity
from vllm_pd.kv_offload.segments.index import Index, Segment


def entries(numbers: range | list[int]) -> Entries:
    keys = [key(i) for i in numbers]
    return Entries(keys, array("I", range(1, len(keys) + 1)), array("Q", range(len(keys))))


def segment(index: Index, number: int, blocks: range | list[int]) -> Segment:
    made = index.open_segment(Identity(number, 0), Path(f"segment-{number}"), 1000)
    index.add(made, entries(blocks))
    return made


def changes(index: Index) -> tuple[set[bytes], set[bytes]]:
    came, went = index.take_changes(10_000)
    return set(came), set(went)


def test_a_block_that_was_added_is_located_and_pins_its_segment() -> None:
    index = Index()
    first = segment(index, 1, range(3))
    assert key(1) in index and key(9) not in index
    located = index.locate([key(2), key(9), key(1)])
    assert (located.positions, located.absent, located.groups) == ([2, 0], [1], [(first, [1, 2])])
    assert first.pins == 2 and first.offset(1) == 2 * 4096
    index.unpin(located.groups)
    assert first.pins == 0


def test_blocks_of_several_segments_are_located_as_they_lie() -> None:
    index = Index()
    first, second = segment(index, 1, range(3)), segment(index, 2, range(3, 6))
    located = index.locate([key(i) for i in (5, 0, 3, 2, 0)])
    assert located.positions == [1, 4, 3, 2, 0] and located.absent == []
    assert located.groups == [(first, [0, 0, 2]), (second, [0, 2])]
    assert located.part(0, 5) == (located.positions, located.groups)
    assert located.part(1, 4) == ([4, 3, 2], [(first, [0, 2]), (second, [0])])
    assert located.part(3, 9) == ([2, 0], [(second, [0, 2])])
    assert (first.pins, second.pins) == (3, 2)
    assert index.locate([]).positions == []


def test_the_newest_copy_counts_and_is_not_news() -> None:
    index = Index()
    old = segment(index, 1, range(3))
    assert changes(index) == ({key(i) for i in range(3)}, set())
    new = segment(index, 2, [1])
    assert pinned(index, 1) == (new, [0])
    assert (old.live, new.live) == (2, 1)
    assert changes(index) == (set(), set())
    assert index.empty(old) == 2
    assert key(1) in index and key(0) not in index


def test_what_is_found_on_the_disk_does_not_replace_what_is_newer() -> None:
    index = Index()
    new = segment(index, 2, [1, 2])
    old = index.open_segment(Identity(1, 0), Path("segment-1"), 1000)
    pauses: list[int] = []
    assert index.adopt(old, entries(range(600)), lambda: pauses.append(1)) == 598
    assert pinned(index, 1) == (new, [0])
    assert len(pauses) == 3, "gave way after each portion"
    assert index.clock == 2


def test_of_two_copies_in_one_segment_the_later_counts() -> None:
    index = Index()
    found = index.open_segment(Identity(1, 0), Path("segment-1"), 1000)
    assert index.adopt(found, entries([5, 6, 5]), lambda: None) == 2
    assert pinned(index, 5) == (found, [2]) and found.live == 2


def test_a_bad_block_leaves_unless_it_is_elsewhere_by_now() -> None:
    index = Index()
    old = segment(index, 1, range(2))
    new = segment(index, 2, [1])
    changes(index)
    assert index.forget([(old, 0), (old, 1)]) == 1
    assert key(0) not in index and key(1) in index
    assert changes(index) == (set(), {key(0)})
    assert index.forget([(new, 0), (new, 0)]) == 1
    assert (old.live, new.live) == (0, 0)


def test_a_segment_under_a_load_is_not_dropped() -> None:
    index = Index()
    old = segment(index, 1, range(2))
    group = pinned(index, 0)
    assert group is not None
    index.empty(old)
    assert not index.drop(old) and index.used_bytes == 1000
    index.unpin([group])
    index.resize(old, 700)
    assert index.used_bytes == 700
    assert index.drop(old) and index.segments() == [] and index.used_bytes == 0


def test_use_is_counted_for_live_blocks_only() -> None:
    index = Index()
    old = segment(index, 1, range(4))
    segment(index, 5, [9])
    index.touch([key(0), key(0), key(1), key(77)])
    assert (old.hot, old.used_at, list(old.heat)) == (2, 5, [2, 1, 0, 0])
    index.forget([(old, 0)])
    assert old.hot == 1
    for _ in range(300):
        index.touch([key(1)])
    assert old.heat[1] == 255
    new = index.open_segment(Identity(6, 0), Path("segment-6"), 1000)
    index.add(new, entries([1, 2]), bytes([127, 0]))
    assert (old.hot, new.hot, old.live, new.live) == (0, 1, 1, 2)
    assert index.live_blocks(old) == [3]


def test_changes_come_in_portions_and_only_the_last_state_of_each_block() -> None:
    index = Index()
    old = segment(index, 1, range(10))
    index.forget([(old, 3)])
    came, went = index.take_changes(4)
    assert (len(came), went) == (3, [key(3)])
    assert len(index.take_changes(100)[0]) == 6
    assert index.take_changes(100) == ([], [])


def test_a_block_takes_less_than_250_bytes_of_memory() -> None:
    count, portion = 100_000, 10_000
    prefix = bytes(28)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    index = Index()
    for first in range(0, count, portion):
        made = index.open_segment(Identity(first, 0), Path("segment"), 1000)
        keys = [prefix + i.to_bytes(8, "big") for i in range(first, first + portion)]
        index.add(made, Entries(keys, array("I", range(portion)), array("Q", range(portion))))
        index.take_changes(portion)
        del keys
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sys.getsizeof(prefix + bytes(8)) < 80
    assert (after - before) / count < 250
