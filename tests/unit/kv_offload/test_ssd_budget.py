"""The budget of the SSD tier, with real files."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.kv_offload import ssd_budget
from vllm_pd.kv_offload.ssd_budget import Limits, SsdBudget, bytes_to_free

PLENTY = 1 << 50
FILE = 64 * 1024


def limits(budget: int, floor: int = 0, **changes: float) -> Limits:
    return Limits(budget, floor, **changes)  # type: ignore[arg-type]


def block(root: Path, number: int, *, age_s: float = 0.0, size: int = FILE) -> Path:
    path = root / "model_1_r0" / f"{number:03x}" / "00_g0" / f"{number:064x}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    when = time.time() - age_s
    os.utime(path, (when, when))
    return path


def on_disk(root: Path) -> int:
    """Bytes below `root`. Files and folders may vanish meanwhile: a budget's thread may be deleting."""
    total = 0
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                total += Path(folder, name).lstat().st_blocks * 512
    return total


@given(
    total=st.integers(0, 10**12),
    free=st.integers(0, 10**12),
    budget=st.integers(1, 10**12),
    floor=st.integers(0, 10**11),
)
def test_eviction_wants_enough_and_never_more_than_there_is(total: int, free: int, budget: int, floor: int) -> None:
    wanted = bytes_to_free(total, free, limits(budget, floor))
    assert 0 <= wanted <= total
    assert total - wanted <= budget
    assert free + wanted >= min(floor, free + total)
    if total <= budget * 0.9 and free >= floor:
        assert wanted == 0


def test_the_least_recently_used_blocks_go_first(tmp_path: Path) -> None:
    old = [block(tmp_path, i, age_s=5000 - i) for i in range(20)]
    new = [block(tmp_path, 100 + i, age_s=100) for i in range(20)]
    used = old.pop(0)
    os.utime(used, (time.time(), used.stat().st_mtime))
    budget = on_disk(tmp_path) * 7 // 10
    SsdBudget(tmp_path, limits(budget), lambda _: PLENTY).scan_and_evict()
    assert on_disk(tmp_path) <= budget
    assert used.exists()
    assert all(p.exists() for p in new)
    gone = [p.exists() for p in old]
    assert gone == sorted(gone)
    assert not gone[0]


def test_nothing_is_deleted_below_the_high_water_mark(tmp_path: Path) -> None:
    files = [block(tmp_path, i) for i in range(8)]
    assert SsdBudget(tmp_path, limits(on_disk(tmp_path) * 2), lambda _: PLENTY).scan_and_evict() == 0
    assert all(p.exists() for p in files)


def test_a_full_file_system_shrinks_the_tier(tmp_path: Path) -> None:
    files = [block(tmp_path, i, age_s=100 - i) for i in range(16)]
    floor = 10 * FILE
    SsdBudget(tmp_path, limits(PLENTY, floor), lambda _: floor - 2 * FILE).scan_and_evict()
    assert [p.exists() for p in files[:2]] == [False, False]
    assert files[-1].exists()


def test_a_write_that_would_exceed_the_budget_is_refused(tmp_path: Path) -> None:
    block(tmp_path, 1)
    budget = SsdBudget(tmp_path, limits(on_disk(tmp_path) + 3 * (FILE + 4096)), lambda _: PLENTY)
    assert not budget.admit(1, FILE), "nothing may be written before the folder was looked at"
    budget.scan_and_evict()
    assert budget.admit(2, FILE)
    assert not budget.admit(2, FILE)
    assert budget.admit(1, FILE)
    assert not budget.admit(1, FILE)


def test_a_write_that_waits_in_a_queue_counts_although_no_scan_sees_it(tmp_path: Path) -> None:
    budget = SsdBudget(tmp_path, limits(3 * (FILE + 4096)), lambda _: PLENTY)
    budget.scan_and_evict()
    assert budget.admit(2, FILE)
    for _ in range(2):
        budget.scan_and_evict()
        assert not budget.admit(2, FILE)
    budget.settle(2, FILE)
    budget.scan_and_evict()
    assert budget.used_bytes == 0
    assert budget.admit(2, FILE)


def test_a_write_that_waits_in_a_queue_counts_against_the_floor(tmp_path: Path) -> None:
    budget = SsdBudget(tmp_path, limits(PLENTY, floor=FILE), lambda _: 3 * FILE)
    budget.scan_and_evict()
    assert budget.admit(1, FILE)
    budget.scan_and_evict()
    assert not budget.admit(1, FILE)


def test_a_write_that_would_go_under_the_floor_is_refused(tmp_path: Path) -> None:
    budget = SsdBudget(tmp_path, limits(PLENTY, floor=FILE), lambda _: 3 * FILE)
    budget.scan_and_evict()
    assert budget.admit(1, FILE)
    assert not budget.admit(1, FILE)


def test_only_what_the_tier_wrote_is_deleted(tmp_path: Path) -> None:
    block(tmp_path, 1, age_s=10)
    outside = tmp_path.parent / f"{tmp_path.name}-outside.bin"
    outside.write_bytes(bytes(FILE))
    (tmp_path / "link.bin").symlink_to(outside)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "letter.txt").write_text("keep me")
    SsdBudget(tmp_path, limits(1), lambda _: PLENTY).scan_and_evict()
    assert sorted(p.name for p in tmp_path.rglob("*") if not p.is_dir()) == ["config.json", "letter.txt", "link.bin"]
    assert outside.exists()
    outside.unlink()


def test_abandoned_temporary_files_go_and_fresh_ones_stay(tmp_path: Path) -> None:
    stale, fresh = tmp_path / "a.bin_1.tmp", tmp_path / "b.bin_2.tmp"
    for path in (stale, fresh):
        path.write_bytes(bytes(FILE))
    os.utime(stale, (0, 0))
    SsdBudget(tmp_path, limits(PLENTY), lambda _: PLENTY).scan_and_evict()
    assert not stale.exists() and fresh.exists()


def test_folders_that_eviction_emptied_are_removed(tmp_path: Path) -> None:
    path = block(tmp_path, 1)
    SsdBudget(tmp_path, limits(1), lambda _: PLENTY).scan_and_evict()
    assert not path.parent.exists()


def test_a_folder_with_more_files_than_one_pass_deletes_is_emptied_by_several(tmp_path: Path) -> None:
    for i in range(10):
        block(tmp_path, i, age_s=i)
    budget = SsdBudget(tmp_path, limits(1, victims_per_pass=4), lambda _: PLENTY)
    left = [len(list(tmp_path.rglob("*.bin"))) for _ in range(3) if budget.scan_and_evict()]
    assert left == [6, 2, 0]


def test_the_thread_makes_room_by_itself_and_stops(tmp_path: Path) -> None:
    for i in range(16):
        block(tmp_path, i, age_s=100 - i)
    target = on_disk(tmp_path) // 2
    budget = SsdBudget(tmp_path, limits(target, tick_s=0.01), lambda _: PLENTY)
    budget.start()
    deadline = time.monotonic() + 30
    while on_disk(tmp_path) > target or not budget.admit(1, 1024):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    budget.stop()
    budget.stop()
    assert budget.used_bytes is not None and budget.used_bytes <= target


def test_a_folder_that_vanishes_is_survived_and_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "gone"
    root.mkdir()
    budget = SsdBudget(root, limits(PLENTY, tick_s=0.001))
    root.rmdir()
    with caplog.at_level("WARNING", logger="vllm.vllm_pd.kv_offload.ssd_budget"):
        budget.start()
        time.sleep(0.1)
        assert len(caplog.records) <= 1
        root.mkdir()
        block(root, 1)
        deadline = time.monotonic() + 30
        while not budget.used_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    budget.stop()


def test_the_default_floor_is_a_twentieth_of_the_disk_and_at_least_a_gib(tmp_path: Path) -> None:
    floor = ssd_budget.default_floor(tmp_path)
    info = os.statvfs(tmp_path)
    assert floor == pytest.approx(max(1 << 30, info.f_blocks * info.f_frsize * 0.05), rel=0.01)
