"""Budget, floor and full disks: never exceeded, never an error of the engine, old and unused things go first."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.unit.kv_offload.segments.rig import BLOCK, LIMIT_S, Rig, config, key, segment_paths, until, used
from vllm_pd.kv_offload.segments import Reason, folder, reclaim
from vllm_pd.kv_offload.segments import writer as writer_module


def test_the_budget_is_never_exceeded_while_blocks_come_and_go(tmp_path: Path) -> None:
    rng = random.Random(1)
    with Rig(config(tmp_path)) as rig:
        budget, came = rig.config.budget_bytes, set[bytes]()
        end, first = time.monotonic() + LIMIT_S, 0
        # On a busy machine readers may hold what would be evicted, and puts are refused meanwhile.
        while first < 3000 or (rig.store.stats().evicted_segments_total <= 20 and time.monotonic() < end):
            rig.put(range(first, first + 20))
            assert used(tmp_path) <= budget
            rig.store.touch([key(i) for i in range(first - 200, first, 7)])
            rig.get(rng.sample(range(first + 20), min(20, first + 20)))
            new, gone = rig.store.take_changes(10_000)
            came = (came | set(new)) - set(gone)
            first += 20
        assert rig.store.flush(LIMIT_S)

        def told() -> list[int]:
            nonlocal came
            new, gone = rig.store.take_changes(10_000)
            came = (came | set(new)) - set(gone)
            has = rig.stored(range(first))
            # The last eviction may be under way.
            return has if came == {key(i) for i in has} else []

        has: list[int] = until(told, "telling exactly what is there")
        stats = rig.store.stats()
        assert stats.evicted_segments_total > 20 and stats.blocks == len(has) > 200
        assert stats.used_bytes == used(tmp_path) <= budget
        assert rig.get(has).ok == tuple(key(i) for i in has)
        # Keeping used blocks writes no more than the setting allows.
        assert stats.rewritten_blocks_total <= 0.25 * stats.evicted_segments_total * 72


def test_used_blocks_outlive_their_segment_and_unused_ones_do_not(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        for first in range(0, 1200, 24):
            rig.store_blocks(range(first, first + 24))
            rig.store.touch([key(i) for i in range(12)])
        assert rig.stored(range(12)) == list(range(12))
        assert rig.stored(range(12, 100)) == []
        assert len(rig.get(range(12)).ok) == 12
        assert rig.store.stats().rewritten_blocks_total >= 12


def test_blocks_that_are_not_used_any_more_go_in_the_end(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(24))
        rig.store.touch([key(0)])
        for first in range(100, 3100, 24):
            rig.store_blocks(range(first, first + 24))
        assert rig.stored(range(24)) == []


def test_free_space_is_kept_and_what_others_take_is_given_up(tmp_path: Path) -> None:
    settings = config(tmp_path)
    disk = 20 * settings.segment_bytes
    with Rig(settings, start=False) as rig:
        others = 0
        rig.store._log._space._free_bytes = lambda path: disk - others - used(tmp_path)
        rig.store._log._space._limits = reclaim.Limits(settings.budget_bytes, 4 * settings.segment_bytes)
        rig.store.start()
        rig.store_blocks(range(400))
        assert len(segment_paths(tmp_path)) >= 6
        others = 13 * settings.segment_bytes
        until(lambda: disk - others - used(tmp_path) >= 4 * settings.segment_bytes, "giving up space")
        until(lambda: len(segment_paths(tmp_path)) <= 3, "room for the next segment too")
        assert rig.store.stats().blocks < 400
        others = 17 * settings.segment_bytes
        until(lambda: len(segment_paths(tmp_path)) <= 1, "giving up all but the open segment")


def test_a_lower_budget_is_obeyed_after_a_restart(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(420))
        before = used(tmp_path)
    smaller = config(tmp_path, budget_bytes=config(tmp_path).budget_bytes // 2)
    assert before > smaller.budget_bytes
    with Rig(smaller):
        until(lambda: used(tmp_path) <= smaller.budget_bytes, "eviction down to the new budget")


def test_segments_of_unused_namespaces_go_first_the_oldest_of_them_before_the_others(tmp_path: Path) -> None:
    for name in ("old", "older"):
        with Rig(config(tmp_path, name=name)) as rig:
            rig.store_blocks(range(180))
    for path in segment_paths(tmp_path / "older"):
        os.utime(path, (1000, 1000))
    with Rig(config(tmp_path, name="mine")) as rig:
        for first in range(0, 400, 10):
            rig.store_blocks(range(first, first + 10))
            assert used(tmp_path) <= rig.config.budget_bytes
            assert not (tmp_path / "older").exists() or len(segment_paths(tmp_path / "old")) == 3
        assert not (tmp_path / "older").exists()
        stats = rig.store.stats()
        assert stats.evicted_segments_total == 0 and stats.foreign_segments_total >= 4
        assert len(rig.get(range(400)).ok) == 400


def test_a_namespace_in_use_is_not_touched_and_both_keep_within_the_budget(tmp_path: Path) -> None:
    with Rig(config(tmp_path, name="one")) as one, Rig(config(tmp_path, name="two", namespace=bytes(32))) as two:
        one.store_blocks(range(400))
        for first in range(0, 600, 24):
            two.put(range(first, first + 24))
            one.put(range(1000 + first, 1024 + first))
            assert used(tmp_path) <= one.config.budget_bytes
        one.store.flush(LIMIT_S)
        two.store.flush(LIMIT_S)
        assert one.store.stats().foreign_segments_total == two.store.stats().foreign_segments_total == 0
        # Who came second gets its share.
        until(lambda: two.put([random.randrange(10**6)]) and len(segment_paths(tmp_path / "two")) >= 2, "a fair share")
        assert one.get(one.stored(range(2000))).failed == {}


def test_a_full_disk_stops_writing_with_one_sentence_and_goes_on_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    with Rig(config(tmp_path), clock=lambda: now[0]) as rig, caplog.at_level(logging.INFO):
        full = rig.disk.fail("open", times=None, error=errno.ENOSPC)
        assert rig.put(range(8)).ok
        until(lambda: rig.store.stats().writes_off and rig.store.stats().puts_lost, "writing to stop")
        assert rig.put(range(100, 108)).failed == {key(i): Reason.NO_SPACE for i in range(100, 108)}
        stats = rig.store.stats()
        assert (stats.writes_off, stats.puts_lost) == (Reason.NO_SPACE, {Reason.NO_SPACE: 8})
        full.release()
        now[0] += 100
        rig.store_blocks(range(8))
        assert rig.store.stats().writes_off is None and len(rig.get(range(8)).ok) == 8
        said = [record.message for record in caplog.records]
        assert len([text for text in said if "nothing is stored for now" in text]) == 1
        assert len([text for text in said if "blocks are stored again" in text]) == 1


@pytest.mark.parametrize("skip", range(6))
def test_a_failed_write_costs_its_batch_and_the_store_goes_on_in_a_new_segment(tmp_path: Path, skip: int) -> None:
    now = [0.0]
    with Rig(config(tmp_path), clock=lambda: now[0]) as rig:
        rig.store_blocks(range(4))
        rig.disk.fail("write", skip=skip)
        for first in range(8, 72, 8):
            rig.put(range(first, first + 8))
            rig.store.flush(LIMIT_S)
            now[0] += 100
        stats = rig.store.stats()
        has = rig.stored(range(72))
        assert stats.failed_writes_total == 1 and stats.puts_lost == {Reason.WRITE_FAILED: 8}
        assert len(has) == 60 and len(rig.get(has).ok) == 60
    with Rig(config(tmp_path)) as again:
        assert again.stored(range(72)) == has and len(again.get(has).ok) == 60


def test_a_failed_sync_is_counted_and_the_blocks_are_still_checked(tmp_path: Path) -> None:
    now = [0.0]
    with Rig(config(tmp_path), clock=lambda: now[0]) as rig:
        rig.store_blocks(range(4))
        rig.disk.fail("sync")
        rig.put(range(8, 12))
        until(lambda: rig.store.stats().failed_writes_total == 1, "the failed sync")
        now[0] += 100
        rig.store_blocks(range(20, 24))
        has = rig.stored(range(30))
        assert len(rig.get(has).ok) == len(has) >= 8


def test_segments_that_cannot_be_removed_do_not_make_the_store_give_up_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "read-only", str(path))

    with Rig(config(tmp_path)) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(folder, "remove_file", refuse)
            for first in range(0, 800, 24):
                rig.put(range(first, first + 24))
            rig.store.flush(LIMIT_S)
            assert used(tmp_path) <= rig.config.budget_bytes
            assert rig.store.stats().blocks >= 300
        rig.store._writer._off_until = 0.0
        until(lambda: rig.put([random.randrange(10**6)]).ok and rig.store.flush(1.0) is not None, "going on")


def test_a_segment_that_could_neither_be_begun_nor_removed_goes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "input/output error", str(path))

    with Rig(config(tmp_path)) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(folder, "remove_file", refuse)
            rig.disk.fail("write")
            rig.put(range(8))
            until(lambda: rig.store.stats().writes_off, "writing to stop")
        assert len(segment_paths(tmp_path)) == 1
        rig.store._writer._look_at = rig.store._writer._off_until = 0.0
        until(lambda: not segment_paths(tmp_path), "its removal")
        rig.store_blocks(range(8))
        assert rig.store.stats().used_bytes == used(tmp_path)


def test_an_error_in_the_writer_itself_pauses_it_and_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def broken(**_: bool) -> bool:
        calls.append(1)
        raise ValueError("broken")

    with Rig(config(tmp_path), start=False) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(writer_module, "_FIRST_PAUSE_S", 60 * LIMIT_S)
            patch.setattr(writer_module, "_LONGEST_PAUSE_S", 60 * LIMIT_S)
            patch.setattr(rig.store._log, "make_room", broken)
            rig.store.start()
            until(lambda: rig.store.stats().writes_off, "the failure")
            assert rig.put([1]).failed == {key(1): Reason.WRITE_FAILED}
        rig.close()
        assert len(calls) == 1, "it does not try without end"


def test_too_much_is_given_up_without_a_pause_between_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(420))
    monkeypatch.setattr(writer_module, "TICK_S", 60 * LIMIT_S)
    smaller = config(tmp_path, budget_bytes=config(tmp_path).budget_bytes // 2)
    with Rig(smaller):
        until(lambda: used(tmp_path) <= smaller.budget_bytes, "eviction down to the new budget")


FULL_DISK = """
    import errno, json, sys
    from pathlib import Path
    from tests.unit.kv_offload.segments.rig import LIMIT_S, Rig, config, used
    root = Path(sys.argv[1])
    # The budget is far beyond the disk: only the disk says stop.
    settings = config(root, budget_bytes=64 << 20, max_segment_bytes=1 << 20)
    ok = wrong = 0
    with Rig(settings) as rig:
        for first in range(0, 1800, 30):
            rig.put(range(first, first + 30))
            rig.store.flush(LIMIT_S)
            rig.store._writer._off_until = 0.0
        has = rig.stored(range(1800))
        got = rig.get(has)
        stats = rig.store.stats()
    with Rig(settings) as rig:
        again = len(rig.get(rig.stored(range(1800))).ok)
    print(json.dumps({"has": len(has), "ok": len(got.ok), "again": again, "evicted": stats.evicted_segments_total,
                      "newest": max(has), "failed": stats.failed_writes_total}))
"""


FULL_AT_START = """
    import sys
    from pathlib import Path
    from tests.unit.kv_offload.segments.rig import Rig, config, until
    from vllm_pd.kv_offload.block_io import choose
    from vllm_pd.kv_offload.segments import Reason
    root = Path(sys.argv[1]) / "root"
    with Rig(config(root)) as rig:
        rig.store_blocks(range(20))
    filler = root.parent / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    print(choose.why_not_nixl(root))
    with Rig(config(root)) as rig:
        has = rig.stored(range(20))
        got = rig.get(has)
        assert all(why is Reason.ABSENT for why in got.failed.values()), "evicted meanwhile, to make room"
        rig.put([100])
        until(lambda: rig.store.stats().writes_off is Reason.NO_SPACE, "writing to stop")
    filler.unlink()
    with Rig(config(root)) as rig:
        rig.store_blocks(range(100, 120))
        assert len(rig.get(range(100, 120)).ok) == 20
"""


def test_a_full_disk_does_not_keep_a_server_from_starting(tmp_path: Path) -> None:
    done = on_small_disk(tmp_path, FULL_AT_START, "4m")
    assert done.stdout == "the disk has no room to try it out\n"


def test_a_file_system_smaller_than_the_budget_is_used_up_to_its_end(tmp_path: Path) -> None:
    result = json.loads(on_small_disk(tmp_path, FULL_DISK, "8m").stdout)
    assert result["has"] == result["ok"] == result["again"] > 500
    assert result["evicted"] > 3 and result["newest"] == 1799, "old segments made room for new ones"
    assert BLOCK * result["has"] < 8 << 20


def on_small_disk(tmp_path: Path, code: str, size: str) -> subprocess.CompletedProcess[str]:
    """Runs a script that is given a real file system of that size, mounted where only it sees it."""
    script, disk = tmp_path / "child.py", tmp_path / "disk"
    script.write_text(textwrap.dedent(code))
    disk.mkdir()
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mount = f"mount -t tmpfs -o size={size} none {disk}"
    if subprocess.run([*command, mount], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    run = f"{mount} && exec {sys.executable} {script} {disk}"
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([*command, run], env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_a_batch_waits_for_segments_that_loads_are_reading_and_is_not_lost(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(600))
        has = rig.stored(range(600))
        read = rig.disk.hang("read", times=None)
        # More than the readers take at once, so that all segments are waited for.
        load, _ = rig.begin_get(has)
        assert read.entered.wait(LIMIT_S)
        threading.Timer(0.5, read.release).start()
        rig.store_blocks(range(1000, 1200), portion=200)
        stats = rig.store.stats()
        assert stats.puts_lost == {} and stats.writes_off is None
        assert len(rig.wait(load).ok) == len(has)
