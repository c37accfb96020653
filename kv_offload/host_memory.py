"""What the host can still hold: memory the kernel can give, cgroup limits, and shared memory that dead servers left.

A tier that does not fit ends in an out-of-memory kill, long after the start and without a word. These checks end in a
sentence instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

from vllm_pd.errors import SettingsError

logger = logging.getLogger(f"vllm.{__name__}")

GIB = 1 << 30
RESERVE_FRACTION = 0.05
RESERVE_MAX_BYTES = GIB
"""Left to the rest of the host: 5% of its memory, 1 GiB at most."""

STALE_REGION_S = 600.0
"""A region younger than this may belong to a server that is starting and has not mapped it everywhere."""

_LOWER = "lower --pd-cpu-gib or --pd-cpu-percent (cpu_bytes_to_use)"

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")


def total_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Memory that this process may ever use: the host's, or less if a cgroup limits it."""
    return min([_meminfo(proc)["MemTotal"], *(limit for limit, _ in _cgroup_levels(proc, cgroup))])


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Memory that could be allocated now without swapping; page cache counts as free, as it can be dropped."""
    headroom = [limit - used for limit, used in _cgroup_levels(proc, cgroup)]
    return max(0, min([_meminfo(proc)["MemAvailable"], *headroom]))


def check_possible(needed: int, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
    """Refuse a tier that this host could not hold even when idle.

    Raises:
        SettingsError: `needed` bytes are more than the host or its cgroup has.
    """
    total = total_bytes(proc, cgroup)
    usable = total - _reserve(total)
    if needed > usable:
        raise SettingsError(
            f"The CPU tier of {_gib(needed)} does not fit this host, which can give at most {_gib(usable)} of its "
            f"{_gib(total)}; {_LOWER}."
        )


def check_available(needed: int, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
    """Refuse an allocation that would run into the out-of-memory killer.

    Raises:
        SettingsError: `needed` bytes are more than is free now.
    """
    usable = available_bytes(proc, cgroup) - _reserve(total_bytes(proc, cgroup))
    if needed > usable:
        raise SettingsError(
            f"The CPU tier needs {_gib(needed)} here but only {_gib(max(0, usable))} of host memory are free beside "
            f"the model; {_LOWER} or free memory."
        )


def check_shared(needed: int, name: str, shm: Path = SHM) -> None:
    """Refuse a tier that does not fit the file system of shared memory: writing past its end is a SIGBUS.

    Args:
        needed: bytes of the region.
        name: of the engine it belongs to. What its region already has, made by another process, counts as free.

    Raises:
        SettingsError: `needed` bytes are more than it can hold now.
    """
    try:
        space = os.statvfs(shm)
    except OSError:
        # Then vLLM cannot make the region either, and says so.
        return
    free = space.f_bavail * space.f_frsize
    with contextlib.suppress(OSError):
        free += region_path(name, shm).stat().st_blocks * 512
    if needed > free:
        raise SettingsError(
            f"The CPU tier of {_gib(needed)} lies in {shm}, where only {_gib(free)} are free; enlarge that (docker run "
            f"--shm-size, a Kubernetes emptyDir of medium Memory at {shm}, or a remount) or {_LOWER}."
        )


def region_path(name: str, shm: Path = SHM) -> Path:
    """Where vLLM puts the region of the engine `name`."""
    return shm / f"vllm_offload_{name}.mmap"


def remove_stale_regions(shm: Path = SHM, proc: Path = PROC) -> list[Path]:
    """Delete offload regions of servers that were killed: our own, old enough, and mapped by no process.

    Deleting the name of a region that somebody does map (in another PID namespace, say) takes nothing from them.
    """
    now = time.time()
    old = {}
    for path in shm.glob("vllm_offload_*.mmap*"):
        try:
            info = path.stat()
        except OSError:
            continue
        if info.st_uid == os.geteuid() and now - info.st_mtime > STALE_REGION_S:
            old[info.st_ino] = path
    if not old:
        return []
    for maps in proc.glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if "vllm_offload_" in line:
                old.pop(int(line.split(maxsplit=5)[4]), None)
    removed = []
    for path in old.values():
        try:
            path.unlink()
        except OSError:
            continue
        logger.warning("Removed %s, shared memory that a killed server left behind.", path)
        removed.append(path)
    return removed


def _reserve(total: int) -> int:
    return min(int(total * RESERVE_FRACTION), RESERVE_MAX_BYTES)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _meminfo(proc: Path) -> dict[str, int]:
    fields = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) >= 2}


def _cgroup_levels(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of every cgroup this process is in that sets a limit."""
    levels = []
    try:
        memberships = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroup, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = cgroup / "memory"
        else:
            continue
        # Inside a container the path may name what only the host sees; the container's own limits are at the root.
        here = root / path.strip("/")
        for folder in (here, *here.parents):
            level = _cgroup_level(folder, *names)
            if level is not None:
                levels.append(level)
            if folder == root:
                break
    return levels


def _cgroup_level(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> tuple[int, int] | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        used = int((folder / usage_name).read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    # cgroup v1 says "no limit" with a number near 2**63.
    if not limit.isdigit() or int(limit) >= 1 << 60:
        return None
    cache = next((int(line.split()[1]) for line in stat if line.split()[0] == cache_name), 0)
    return int(limit), max(0, used - cache)
