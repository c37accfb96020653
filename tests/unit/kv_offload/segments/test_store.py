"""Blocks go in and come out; the user is never made to wait and is told what became of each block."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.unit.kv_offload.segments.rig import BLOCK, LIMIT_S, Rig, config, content, key, rows, segment_paths, until
from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.segments import Reason, Rows, StoreConfig


def test_what_was_stored_is_loaded(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        put = rig.put(range(20))
        assert put.ok == tuple(key(i) for i in range(20)) and not put.failed and not put.is_load
        assert put.bytes == 20 * BLOCK
        assert rig.store.flush(LIMIT_S)
        # In any order, some twice, more than a reader takes at once.
        numbers = [7, 3, 19, 0, *range(4, 19), 7]
        got = rig.get(numbers)
        assert got.ok == tuple(key(i) for i in numbers) and not got.failed and got.is_load
        assert got.bytes == len(numbers) * BLOCK and 0 <= got.waited_s <= got.seconds
        stats = rig.store.stats()
        assert (stats.blocks, stats.written_blocks_total, stats.read_blocks_total) == (20, 20, len(numbers))


@pytest.mark.parametrize("size", [100, 4096, 5000, 3 * 4096 + 8])
def test_blocks_of_any_size_come_back_whole(tmp_path: Path, size: int) -> None:
    with Rig(config(tmp_path, block_bytes=size)) as rig:
        rig.store_blocks(range(30))
        assert len(rig.get(range(30)).ok) == 30


def test_a_block_larger_than_a_batch_a_reader_and_a_piece_is_stored(tmp_path: Path) -> None:
    size = (5 << 20) + 4096
    with Rig(config(tmp_path, block_bytes=size, budget_bytes=64 * size)) as rig:
        rig.store_blocks(range(3))
        assert len(rig.get([2, 0, 1]).ok) == 3


def test_keys_of_different_lengths_live_together(tmp_path: Path) -> None:
    keys = [b"a", b"b" * 255, b"c" * 36]
    with Rig(config(tmp_path)) as rig:
        rig.store.put(1, keys, rows(content(i) for i in range(3)))
        assert rig.wait(1).ok == tuple(keys)
        rig.store.flush(LIMIT_S)
    with Rig(config(tmp_path)) as rig:
        targets = rows(bytes(BLOCK) for _ in range(5))
        rig.store.get(1, keys, Rows(targets.memory, [4, 0, 2]), LIMIT_S)
        assert rig.wait(1).ok == tuple(keys)
        expected = [content(1), bytes(BLOCK), content(2), bytes(BLOCK), content(0)]
        assert bytes(targets.memory) == b"".join(expected), "each in its row, and no other row was touched"


def test_a_block_is_contained_only_when_it_is_really_stored(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        write = rig.disk.hang("write", skip=1)
        assert rig.put(range(4)).ok
        assert write.entered.wait(LIMIT_S)
        assert rig.stored(range(4)) == [] and rig.store.peek([key(0)]) == 0
        assert rig.get(range(4)).failed == {key(i): Reason.ABSENT for i in range(4)}
        assert rig.store.take_changes(10) == ([], [])
        write.release()
        assert rig.store.flush(LIMIT_S)
        assert rig.stored(range(4)) == [0, 1, 2, 3]
        assert rig.store.take_changes(10) == ([key(i) for i in range(4)], [])


def test_the_leading_run_of_stored_blocks_is_counted(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks([0, 1, 2, 4])
        keys = [key(i) for i in range(5)]
        assert (rig.store.peek(keys), rig.store.peek(keys[3:]), rig.store.peek([])) == (3, 0, 0)


def test_absent_keys_fail_and_the_others_are_loaded(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks([0, 2])
        got = rig.get([0, 1, 2])
        assert got.ok == (key(0), key(2)) and got.failed == {key(1): Reason.ABSENT}
        assert rig.get([5]).failed == {key(5): Reason.ABSENT}
        assert rig.get([]).ok == () and rig.put([]).ok == ()


def test_a_block_is_written_once(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        assert rig.put([1, 1, 2]).ok == (key(1), key(1), key(2))
        rig.store_blocks([1, 2, 3])
        stats = rig.store.stats()
        assert stats.written_blocks_total == 3 and stats.duplicate_blocks_total == 3


def test_sources_are_free_when_the_ticket_is_finished_although_the_disk_hangs(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        write = rig.disk.hang("write", skip=1)
        sources = rows(content(i) for i in range(4))
        rig.store.put(1, [key(i) for i in range(4)], sources)
        assert rig.wait(1).ok
        sources.memory[:] = b"x" * (4 * BLOCK)
        write.release()
        rig.store.flush(LIMIT_S)
        assert len(rig.get(range(4)).ok) == 4


def test_what_a_slow_disk_does_not_take_is_refused_and_counted(tmp_path: Path) -> None:
    settings = config(tmp_path, put_wait_s=0.05, backlog_bytes=40 * BLOCK)
    with Rig(settings) as rig:
        write = rig.disk.hang("write", skip=1)
        results = [rig.wait(ticket) for ticket in [rig.begin_put(range(i, i + 10)) for i in range(0, 200, 10)]]
        assert write.entered.wait(LIMIT_S)
        refused = [why for result in results for why in result.failed.values()]
        assert set(refused) == {Reason.BUSY}
        taken = sum(len(result.ok) for result in results)
        # Four batches of staging memory, whatever is asked for.
        assert 0 < taken <= 32
        assert rig.store.stats().puts_refused == {Reason.BUSY: len(refused)}
        write.release()
        assert rig.store.flush(LIMIT_S)
        assert rig.store.stats().blocks == taken
        assert not rig.put([500]).failed, "it takes blocks again"


def test_a_put_that_the_backlog_has_no_room_for_keeps_its_leading_blocks(tmp_path: Path) -> None:
    with Rig(config(tmp_path, backlog_bytes=10 * BLOCK)) as rig:
        result = rig.put(range(30))
        assert result.ok == tuple(key(i) for i in range(10))
        assert result.failed == {key(i): Reason.BUSY for i in range(10, 30)}


def test_memory_or_a_key_of_the_wrong_size_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        good = memoryview(bytearray(BLOCK))
        for keys, blocks in (
            ([b"k"], Rows(good[:-1], [0])),
            ([b"k"], Rows(good, [1])),
            ([b"k"], Rows(good, [-1])),
            ([b"k"], Rows(memoryview(bytes(BLOCK)), [0])),
            ([b"k"], Rows(memoryview(bytearray(2 * BLOCK))[::2], [0])),
            ([b""], Rows(good, [0])),
            ([b"k" * 256], Rows(good, [0])),
            ([b"k"], Rows(good, [])),
        ):
            with pytest.raises(ValueError):
                rig.store.put(1, keys, blocks)
            with pytest.raises(ValueError):
                rig.store.get(1, keys, blocks, 1.0)
        assert rig.store.drain(LIMIT_S) and rig.store.finished() == []


def test_files_are_private(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Rig(config(root, about={"model": "a/b"})) as rig:
        rig.store_blocks(range(4))
        assert {stat.S_IMODE(path.stat().st_mode) for path in (root, rig.config.folder)} == {0o700}
        files = [path for path in root.rglob("*") if path.is_file()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_after_the_end_everything_is_refused_and_a_second_end_does_nothing(tmp_path: Path) -> None:
    rig = Rig(config(tmp_path))
    rig.store_blocks(range(4))
    rig.close()
    assert rig.put([9]).failed == {key(9): Reason.CLOSED}
    assert rig.get([0]).failed == {key(0): Reason.CLOSED}
    rig.store.close(LIMIT_S)


def test_what_was_taken_over_is_written_before_the_end(tmp_path: Path) -> None:
    rig = Rig(config(tmp_path))
    assert rig.put(range(20)).ok
    rig.close()
    with Rig(config(tmp_path)) as again:
        assert len(again.get(range(20)).ok) == 20


def test_a_store_that_was_never_started_can_be_closed(tmp_path: Path) -> None:
    Rig(config(tmp_path), start=False).close()
    Rig(config(tmp_path)).close()


def test_many_segments_need_few_open_files(tmp_path: Path) -> None:
    with Rig(config(tmp_path, open_files=2)) as rig:
        rig.store_blocks(range(300))
        assert len(segment_paths(tmp_path)) > 4
        for first in range(0, 300, 7):
            assert len(rig.get([first, (first * 13) % 300, (first * 29) % 300]).ok) == 3
        until(lambda: len(rig.store._files) <= 2, "the closing of files")


def test_a_budget_for_less_than_a_few_blocks_is_an_error_that_says_how_much(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"too small for blocks of 4\.00 MiB; give it at least 0\.0"):
        config(tmp_path, block_bytes=4 << 20, budget_bytes=16 << 20)


@pytest.mark.parametrize("block", [100, 4096, 1 << 20])
def test_the_smallest_budget_works(tmp_path: Path, block: int) -> None:
    least = 0
    for budget in range(1 << 15, 1 << 26, 4096 * 8):
        try:
            settings = config(tmp_path, block_bytes=block, budget_bytes=budget)
        except SettingsError:
            continue
        least = budget
        break
    assert least and isinstance(settings, StoreConfig)
    with Rig(settings) as rig:
        rig.store_blocks([1, 2])
        assert len(rig.get([1, 2]).ok) == 2
