"""Which processes belong to one that we started, from Linux's /proc.

A process is named by its pid together with its start time, because the kernel reuses pids: signalling a remembered
number alone could hit a stranger.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SHM = Path("/dev/shm")
_DEAD_STATES = frozenset("ZX")
_CLOCK_SLACK_S = 0.05
"""Starts are known to the clock tick, and so are the times of files."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process. `started` is in clock ticks after boot."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class _Stat:
    id: ProcessId
    state: str
    parent: int
    session: int


def _read_stat(pid: int) -> _Stat | None:
    try:
        # Whoever runs on this machine may have given a process a name that is no text.
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name, in parentheses, may hold spaces and parentheses itself; what follows the last one is regular.
    fields = text.rpartition(")")[2].split()
    return _Stat(ProcessId(pid, int(fields[19])), fields[0], int(fields[1]), int(fields[3]))


def _living() -> list[_Stat]:
    stats = (_read_stat(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return [stat for stat in stats if stat is not None and stat.state not in _DEAD_STATES]


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None if there is none."""
    stat = _read_stat(pid)
    return stat.id if stat is not None else None


def own_age_s() -> float:
    """Seconds since this process was started; 0 where that cannot be known."""
    own = identify(os.getpid())
    if own is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - own.started / os.sysconf("SC_CLK_TCK")


def everyone() -> frozenset[ProcessId]:
    """All processes of this machine that run; zombies left out."""
    return frozenset(stat.id for stat in _living())


def family(leader: ProcessId) -> frozenset[ProcessId]:
    """Everything that runs in the session that `leader` leads or led, or descends from it; zombies left out."""
    now = identify(leader.pid)
    if now is not None and now != leader:
        # The pid was reused. The kernel does that only after the last member of the old session is gone.
        return frozenset()
    living = _living()
    members = {stat.id.pid: stat.id for stat in living if stat.session == leader.pid}
    grew = True
    while grew:
        children = {s.id.pid: s.id for s in living if s.parent in members and s.id.pid not in members}
        members |= children
        grew = bool(children)
    return frozenset(members.values())


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs (a zombie does not)."""
    stat = _read_stat(process.pid)
    return stat is not None and stat.id == process and stat.state not in _DEAD_STATES


def send(processes: Iterable[ProcessId], number: signal.Signals) -> None:
    """Signal those that still run. A pid that was reused meanwhile is left alone, and so is one that is not ours to
    signal."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            handle = os.pidfd_open(process.pid)
            try:
                # The handle pins the process, so what is checked now is what gets the signal.
                if is_alive(process):
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)


def shared_memory(processes: Iterable[ProcessId]) -> frozenset[str]:
    """Paths in /dev/shm that the processes have mapped or open.

    Files are matched by inode: a semaphore is made under a passing name, and that is the one a mapping shows.
    """
    inodes: set[int] = set()
    for process in processes:
        folder = PROC / str(process.pid)
        with contextlib.suppress(OSError):
            for line in (folder / "maps").read_text(errors="replace").splitlines():
                # address, permissions, offset, device, inode, path
                fields = line.split(maxsplit=5)
                if fields[-1].startswith(f"{SHM}/"):
                    inodes.add(int(fields[4]))
        with contextlib.suppress(OSError):
            for entry in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(entry.readlink()).startswith(f"{SHM}/"):
                        inodes.add(entry.stat().st_ino)
    return frozenset(str(path) for path, inode in _shared_memory_files() if inode in inodes)


def made_since(paths: Iterable[str], started: int) -> frozenset[str]:
    """Those of the files that did not exist before a process that was started then (see `ProcessId`): a file that was
    there before, a model that is kept in memory say, is not what the process would leave.
    """
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    earliest = boot + started / os.sysconf("SC_CLK_TCK") - _CLOCK_SLACK_S
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            if Path(path).lstat().st_ctime >= earliest:
                found.append(path)
    return frozenset(found)


def _shared_memory_files() -> list[tuple[Path, int]]:
    found = []
    for path in SHM.iterdir():
        with contextlib.suppress(OSError):
            found.append((path, path.lstat().st_ino))
    return found
