"""Which reader gets what, and when."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from tests.unit.kv_offload.segments.rig import BLOCK, key, rows
from vllm_pd.kv_offload.segments import load as load_module
from vllm_pd.kv_offload.segments.format import Entries, Identity
from vllm_pd.kv_offload.segments.index import Index, Segment
from vllm_pd.kv_offload.segments.load import Load, LoadQueue
from vllm_pd.kv_offload.segments.outcome import Reason

READERS = 4
MOST = 8


class Queue:
    """A queue for four readers, over an index of 1,000 blocks in one segment."""

    def __init__(self) -> None:
        self.index = Index()
        self.segment: Segment = self.index.open_segment(Identity(1, 0), Path("segment"), 1000)
        keys = [key(i) for i in range(1000)]
        self.index.add(self.segment, Entries(keys, array("I", range(1000)), array("Q", range(1000))))
        self.ended: list[Load] = []
        self.queue = LoadQueue(READERS, self.index, self.ended.append, lambda: 0.0)

    def add(self, numbers: range, part: int = 4) -> Load:
        targets = rows(bytes(BLOCK) for _ in numbers)
        keys = [key(i) for i in numbers]
        load = Load(1, keys, self.index.locate(keys), targets, targets.addresses(BLOCK), 1.0, 0.0)
        load.split(part)
        assert self.queue.add(load)
        return load

    def take(self, most: int = MOST) -> int:
        """Blocks that the next reader gets."""
        return sum(len(part) for part in self.queue.take(most))


def test_two_of_four_read_at_a_time_and_the_first_takes_half() -> None:
    queue = Queue()
    queue.add(range(100))
    assert (queue.take(), queue.take()) == (MOST // 2, MOST)
    queue.queue.read_over()
    assert queue.take() == MOST, "the second is still reading"
    queue.queue.read_over()
    queue.queue.read_over()
    assert queue.take() == MOST // 2


def test_towards_the_end_all_get_a_share() -> None:
    queue = Queue()
    queue.add(range(40), part=1)
    queue.take()
    assert queue.take(MOST * 2) == (40 - MOST // 2) // READERS


def test_a_part_is_taken_whole_however_small_the_share() -> None:
    queue = Queue()
    queue.add(range(5), part=4)
    assert (queue.take(), queue.take()) == (4, 1)


def test_who_gets_no_turn_because_others_hang_reads_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "TURN_S", 0.01)
    queue = Queue()
    queue.add(range(100))
    for _ in range(READERS):
        assert queue.take() > 0


def test_a_load_that_is_late_gives_back_what_nobody_took_and_hears_of_the_rest_from_its_reader() -> None:
    queue = Queue()
    load = queue.add(range(20))
    [part] = queue.queue.take(MOST)
    queue.queue.end_late(2.0)
    assert queue.ended == [load] and set(load.failed.values()) == {Reason.LATE}
    assert queue.segment.pins == len(part) and queue.queue.blocks == 0
    queue.index.unpin(part.groups)
    queue.queue.part_done(load)
    assert queue.segment.pins == 0 and queue.ended == [load]


def test_a_closed_queue_gives_out_what_it_has_and_then_nothing() -> None:
    queue = Queue()
    queue.add(range(4))
    queue.queue.close()
    assert queue.take() == 4
    assert queue.queue.take(MOST) == []
