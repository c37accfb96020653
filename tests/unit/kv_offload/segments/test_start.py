"""A start finds what earlier runs left, announces it by and by, and one process at a time uses a namespace."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.kv_offload.segments.rig import LIMIT_S, Rig, config, key, pinned, segment_paths
from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.segments import folder, recovery
from vllm_pd.kv_offload.segments.lock import FolderLock, holder


def test_everything_is_there_again_and_is_announced(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(150))
    with Rig(config(tmp_path)) as rig:
        stats = rig.store.stats()
        assert (stats.blocks, stats.recovered_blocks_total, stats.recovering) == (150, 150, False)
        came, went = rig.store.take_changes(100)
        assert (len(came), went) == (100, [])
        came += rig.store.take_changes(100)[0]
        assert sorted(came) == sorted(key(i) for i in range(150))
        assert len(rig.get(range(150)).ok) == 150


def test_the_user_is_served_while_the_disk_hangs_at_start(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(20))
    rig = Rig(config(tmp_path, put_wait_s=0.05), start=False)
    read = rig.disk.hang("read")
    rig.store.start()
    with rig:
        assert read.entered.wait(LIMIT_S)
        assert rig.store.stats().recovering and not rig.store.contains(key(0))
        assert rig.get([0]).failed
        assert rig.put([100]).ok == (key(100),)
        read.release()
        assert rig.store.wait_recovered(LIMIT_S) and rig.store.flush(LIMIT_S)
        assert len(rig.get([*range(20), 100]).ok) == 21


def test_a_start_that_is_ended_at_once_leaves_everything_for_the_next(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(300))
    rig = Rig(config(tmp_path), start=False)
    rig.store.start()
    rig.close()
    with Rig(config(tmp_path)) as again:
        assert len(again.get(range(300)).ok) == 300


def test_a_segment_that_fails_unexpectedly_costs_its_own_blocks_and_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for life in range(3):
        with Rig(config(tmp_path)) as rig:
            rig.store_blocks(range(10 * life, 10 * life + 10))
    before = segment_paths(tmp_path)
    read = recovery.read_segment

    def fails_for_the_second(reader: recovery.Read, size: int) -> recovery.Found:
        found = read(reader, size)
        if found.header.identity.segment_id == 1:
            raise ValueError("injected")
        return found

    monkeypatch.setattr(recovery, "read_segment", fails_for_the_second)
    with Rig(config(tmp_path)) as rig:
        assert rig.stored(range(30)) == [*range(10), *range(20, 30)]
        assert rig.store.stats().segments == 3, "it is among those that are evicted"
    assert segment_paths(tmp_path) == before


def test_segments_are_never_written_to_again_and_get_their_footer(tmp_path: Path) -> None:
    for life in range(4):
        with Rig(config(tmp_path)) as rig:
            rig.store_blocks(range(10 * life, 10 * life + 10))
    files = folder.segment_files(config(tmp_path).folder)
    assert [file.id for file in files] == [0, 1, 2, 3]
    assert all(file.size < config(tmp_path).segment_bytes // 2 for file in files), "cut to what they hold"
    with Rig(config(tmp_path)) as rig:
        assert len(rig.get(range(40)).ok) == 40


def test_a_run_that_stored_nothing_leaves_no_segment(tmp_path: Path) -> None:
    with Rig(config(tmp_path)):
        pass
    assert segment_paths(tmp_path) == []


def test_a_block_that_is_in_several_segments_is_found_in_the_newest(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(10))
        group = pinned(rig.store._index, 3)
        assert group is not None
        rig.store._index.forget([(group[0], group[1][0])])
        rig.store._index.unpin([group])
        rig.store_blocks([3, *range(100, 160)])
    with Rig(config(tmp_path)) as rig:
        group = pinned(rig.store._index, 3)
        assert group is not None and group[1][0] > 9
        assert rig.store.stats().blocks == 70 and rig.get([3]).ok


HOLDER = """
import sys, time
from pathlib import Path
from vllm_pd.kv_offload.segments.lock import FolderLock
assert FolderLock.take(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_refused_with_the_pid_of_the_first_and_welcome_after_its_end(tmp_path: Path) -> None:
    where = config(tmp_path).folder
    where.mkdir(parents=True)
    other = subprocess.Popen([sys.executable, "-c", HOLDER, str(where)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(SettingsError, match=f"in use by process {other.pid}; stop it, or give"):
            Rig(config(tmp_path))
        assert holder(where) == other.pid
        with Rig(config(tmp_path, name="model-b")) as rig:
            rig.store_blocks([1])
    finally:
        other.kill()
        other.wait()
    with Rig(config(tmp_path)) as rig:
        assert holder(where) == os.getpid()
        rig.store_blocks([1])
    assert holder(where) is None


def test_a_lock_on_a_removed_folder_is_not_taken_for_one_on_its_successor(tmp_path: Path) -> None:
    where = tmp_path / "a"
    where.mkdir()
    first = FolderLock.take(where)
    assert first is not None
    folder.remove_namespace(where, first)
    assert not where.exists()
    where.mkdir()
    second = FolderLock.take(where)
    assert second is not None and FolderLock.take(where) is None
    second.release()
    second.release()


def test_a_lock_holds_and_is_given_back_on_a_disk_without_room_for_a_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(2):
        lock = FolderLock.take(tmp_path)
        assert lock is not None and FolderLock.take(tmp_path) is None
        assert holder(tmp_path) == 0, "somebody, but nobody knows who"
        lock.release()


def test_a_namespace_that_was_used_just_before_it_is_locked_is_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "lock").touch()
    take = FolderLock.take

    def late(path: Path) -> FolderLock | None:
        for number in range(2):
            (path / folder.segment_name(number)).write_bytes(b"x")
        return take(path)

    monkeypatch.setattr(folder.FolderLock, "take", late)
    assert folder.remove_oldest_foreign(tmp_path, tmp_path / "own") == 1
    assert [usage.path for usage in folder.usages(tmp_path)] == [other], "what is left still counts"


def test_a_folder_that_cannot_be_made_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"cannot use .* give --pd-ssd-path a folder"):
        Rig(config(tmp_path / "file" / "root"))


def test_the_store_needs_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None\n"
        "import vllm_pd.kv_offload.segments.store, vllm_pd.kv_offload.segments.check"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=2 * LIMIT_S)
