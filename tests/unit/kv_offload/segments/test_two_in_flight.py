"""Batches that are written beside each other: in order for whoever looks, and sharing the end of one that fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.kv_offload.faulty_io import Fault
from tests.unit.kv_offload.segments.rig import LIMIT_S, Rig, config, until
from vllm_pd.kv_offload.segments import Reason
from vllm_pd.kv_offload.segments import writer as writer_module
from vllm_pd.kv_offload.segments.space import NoRoom

HEADER_OF_A_SEGMENT = 1
"""Writes before the first batch."""


def two_batches(rig: Rig, first: Fault) -> None:
    """Blocks 0 to 7, which hang in `first`, and 8 to 15, which reach the disk."""
    rig.put(range(8))
    assert first.entered.wait(LIMIT_S)
    before = rig.disk.counts["write"]
    rig.put(range(8, 16))
    until(lambda: rig.disk.counts["write"] > before, "the second batch")
    time.sleep(0.05)


def test_a_batch_is_written_beside_the_one_before_and_appears_after_it(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        first = rig.disk.hang("write", skip=HEADER_OF_A_SEGMENT)
        two_batches(rig, first)
        assert rig.stored(range(16)) == [], "after a crash now, a walk over the batches would not come to the second"
        assert not rig.store.flush(0.05)
        first.release()
        assert rig.store.flush(LIMIT_S)
        assert len(rig.get(range(16)).ok) == 16
    with Rig(config(tmp_path)) as again:
        assert len(again.get(range(16)).ok) == 16


def test_a_batch_that_fails_takes_the_one_beside_it_along_and_nothing_else(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(100, 120))
        rig.disk.fail("write")
        first = rig.disk.hang("write")
        two_batches(rig, first)
        first.release()
        until(lambda: rig.store.stats().writes_off, "writing to stop")
        assert rig.store.flush(LIMIT_S)
        stats = rig.store.stats()
        assert stats.puts_lost == {Reason.WRITE_FAILED: 16} and stats.failed_writes_total == 1
        assert rig.stored(range(16)) == []
        assert len(rig.get(range(100, 120)).ok) == 20
        until(lambda: rig.store._writer.refusing is None, "the end of the pause")
        rig.store_blocks(range(16))
        assert len(rig.get(range(16)).ok) == 16
    with Rig(config(tmp_path)) as again:
        assert len(again.get([*range(16), *range(100, 120)]).ok) == 36


def test_a_batch_begun_before_there_was_no_room_does_not_resume_writing(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        first = rig.disk.hang("write", skip=HEADER_OF_A_SEGMENT)
        rig.put(range(8))
        assert first.entered.wait(LIMIT_S)
        log = rig.store._log

        def full(*_: object, **__: object) -> None:
            raise NoRoom("no room")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(log, "begin", full)
            patch.setattr(writer_module, "_FIRST_PAUSE_S", LIMIT_S)
            rig.put(range(8, 16))
            until(lambda: rig.store.stats().writes_off, "writing to stop")
            first.release()
            until(lambda: rig.stored(range(8)) == list(range(8)), "the first batch")
            assert rig.store.flush(LIMIT_S)
            assert rig.store.stats().writes_off is Reason.NO_SPACE
        rig.store._writer._off_until = 0.0
        rig.store_blocks(range(8, 16))
        assert rig.store.stats().writes_off is None


def test_an_error_in_the_thread_that_writes_is_no_success(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(100, 108))

        def broken(pieces: object) -> None:
            raise ZeroDivisionError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rig.disk, "write", broken)
            rig.put(range(8))
            until(lambda: rig.store.stats().writes_off is Reason.WRITE_FAILED, "writing to stop")
            assert rig.store.flush(LIMIT_S)
            assert rig.stored(range(8)) == []
        until(lambda: rig.store._writer.refusing is None, "the end of the pause")
        rig.store_blocks(range(8))
        assert len(rig.get([*range(8), *range(100, 108)]).ok) == 16


def test_a_footer_that_fails_is_told_and_its_blocks_are_found_by_their_batches(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(60))
        # The sync of the full segment, behind the first batch of the next.
        rig.disk.fail("sync")
        rig.put(range(60, 76))
        until(lambda: rig.store.stats().writes_off is Reason.WRITE_FAILED, "writing to stop")
        until(lambda: rig.store._writer.refusing is None, "the end of the pause")
        rig.store_blocks(range(100, 110))
        there = rig.stored(range(76))
        assert len(there) >= 60
    with Rig(config(tmp_path)) as again:
        assert set(again.stored(range(76))) >= set(there)
        assert len(again.get(there).ok) == len(there)
