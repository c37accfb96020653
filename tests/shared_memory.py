"""Finds shared memory that the processes of a test run left behind, and leaves that of others alone.

A file in /dev/shm does not say who made it. So the run's processes are looked at now and then, and what one of them has
mapped or open is the run's. What lives for less than a look is missed: a model server lives much longer.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from vllm_pd.graph.proc_tree import ProcessId, everyone, identify, shared_memory

SHM = Path("/dev/shm")
LOOK_EVERY_S = 2.0


class SharedMemoryWatch:
    """Watches a process and whatever descends from it.

    Args:
        root: pid of the process; this one if 0.
    """

    def __init__(self, root: int = 0) -> None:
        start = identify(root or os.getpid())
        # A process stays one of ours when its parent ends, so those once seen are remembered.
        self._family: set[ProcessId] = {start} if start is not None else set()
        self._before = {path.name for path in SHM.iterdir()}
        self._used: set[str] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shared_memory_watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def look(self) -> None:
        """Note what the family uses now."""
        with self._lock:
            living = everyone()
            self._family &= living
            grew = True
            while grew:
                pids = {process.pid for process in self._family}
                children = {p for p in living - self._family if _parent(p.pid) in pids}
                self._family |= children
                grew = bool(children)
            self._used |= {Path(path).name for path in shared_memory(self._family)}

    def left(self) -> list[str]:
        """Names of files that are new, were used by the family, and are used by nobody now."""
        self.look()
        new = {path.name for path in SHM.iterdir()} - self._before
        suspects = new & self._used
        return sorted(suspects - {Path(path).name for path in shared_memory(everyone())}) if suspects else []

    def _work(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            self.look()


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
