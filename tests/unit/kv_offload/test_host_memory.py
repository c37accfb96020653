"""Memory checks against /proc and /sys trees of the shapes Linux shows."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload import host_memory

GIB = 1 << 30


def host(tmp_path: Path, *, total_gib: float = 64, available_gib: float = 32, membership: str = "0::/") -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    kib = GIB // 1024
    (proc / "meminfo").write_text(
        f"MemTotal: {int(total_gib * kib)} kB\nMemFree: 1 kB\nMemAvailable: {int(available_gib * kib)} kB\n"
    )
    (proc / "self" / "cgroup").write_text(membership + "\n")
    return proc


def group(folder: Path, limit: str, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_without_cgroup_the_host_counts(tmp_path: Path) -> None:
    proc = host(tmp_path)
    assert host_memory.total_bytes(proc, tmp_path) == 64 * GIB
    assert host_memory.available_bytes(proc, tmp_path) == 32 * GIB


def test_the_tightest_cgroup_on_the_way_up_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    proc = host(tmp_path, membership="0::/pod/worker")
    cgroup = tmp_path / "cgroup"
    group(cgroup, "max", 0)
    group(cgroup / "pod", str(10 * GIB), 7 * GIB, cache=2 * GIB)
    group(cgroup / "pod" / "worker", str(20 * GIB), 1 * GIB)
    assert host_memory.total_bytes(proc, cgroup) == 10 * GIB
    assert host_memory.available_bytes(proc, cgroup) == 5 * GIB


def test_a_container_finds_its_limit_at_the_root(tmp_path: Path) -> None:
    proc = host(tmp_path, membership="0::/kubepods/deep/down")
    group(tmp_path / "cgroup", str(8 * GIB), 1 * GIB)
    assert host_memory.available_bytes(proc, tmp_path / "cgroup") == 7 * GIB


def test_cgroup_v1_is_read_as_well(tmp_path: Path) -> None:
    proc = host(tmp_path, membership="4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/x")
    folder = tmp_path / "cgroup" / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(4 * GIB))
    (folder / "memory.usage_in_bytes").write_text(str(3 * GIB))
    (folder / "memory.stat").write_text(f"total_inactive_file {GIB}\n")
    (folder.parent / "memory.limit_in_bytes").write_text("9223372036854771712")
    (folder.parent / "memory.usage_in_bytes").write_text("1")
    (folder.parent / "memory.stat").write_text("")
    assert host_memory.available_bytes(proc, tmp_path / "cgroup") == 2 * GIB


def test_a_tier_larger_than_the_host_is_refused_with_one_sentence(tmp_path: Path) -> None:
    proc = host(tmp_path)
    host_memory.check_possible(62 * GIB, proc, tmp_path)
    with pytest.raises(SettingsError, match=r"70\.00 GiB does not fit .* lower --pd-cpu-gib"):
        host_memory.check_possible(70 * GIB, proc, tmp_path)


def test_a_tier_larger_than_what_is_free_is_refused(tmp_path: Path) -> None:
    proc = host(tmp_path)
    host_memory.check_available(31 * GIB, proc, tmp_path)
    with pytest.raises(SettingsError, match=r"needs 31\.50 GiB here but only 31\.00 GiB"):
        host_memory.check_available(int(31.5 * GIB), proc, tmp_path)


def test_this_host_can_be_read() -> None:
    assert 0 < host_memory.available_bytes() <= host_memory.total_bytes()


def test_a_tier_larger_than_shared_memory_is_refused_and_its_own_region_counts_as_free(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    host_memory.check_shared(free // 2, "engine", tmp_path)
    with pytest.raises(SettingsError, match=r"lies in .* --shm-size.* lower --pd-cpu-gib or --pd-cpu-percent"):
        host_memory.check_shared(2 * free, "engine", tmp_path)
    monkey = SimpleNamespace(f_bavail=10, f_frsize=mmap.PAGESIZE)
    own = tmp_path / "vllm_offload_engine.mmap"
    own.write_bytes(b"x" * 64 * mmap.PAGESIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: monkey)
        host_memory.check_shared(70 * mmap.PAGESIZE, "engine", tmp_path)
        with pytest.raises(SettingsError):
            host_memory.check_shared(70 * mmap.PAGESIZE, "another", tmp_path)


def test_where_there_is_no_shared_memory_vllm_says_so(tmp_path: Path) -> None:
    host_memory.check_shared(1 << 60, "engine", tmp_path / "absent")


def region(shm: Path, name: str, *, age_s: float) -> Path:
    path = shm / f"vllm_offload_{name}.mmap"
    path.write_bytes(bytes(mmap.PAGESIZE))
    when = time.time() - age_s
    os.utime(path, (when, when))
    return path


def test_only_old_regions_that_nobody_maps_are_removed(tmp_path: Path) -> None:
    dead = region(tmp_path, "dead", age_s=3600)
    starting = region(tmp_path, "starting", age_s=5)
    living = region(tmp_path, "living", age_s=3600)
    other = tmp_path / "something_else.mmap"
    other.write_bytes(b"x")
    with living.open("r+b") as handle, mmap.mmap(handle.fileno(), 0):
        os.utime(living, (0, 0))
        assert host_memory.remove_stale_regions(tmp_path) == [dead]
    assert starting.exists() and living.exists() and other.exists()
