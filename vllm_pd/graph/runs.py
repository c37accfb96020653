"""Where a graph that runs keeps what other commands need to find it.

$VLLM_PD_RUN_DIR, else $XDG_STATE_HOME/vllm-pd, else ~/.local/state/vllm-pd
  HOST/GRAPH/            only its owner may enter it
    lock                 held by the supervisor, and by the guard that cleans up after one that was killed
    control.sock         the supervisor's control interface
    processes            what was started and has not ended
    logs/NAME.log        kept when the graph is down; each keeps one older part, NAME.log.1
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm_pd.errors import GraphError
from vllm_pd.graph.proc_tree import PROC, ProcessId

RUN_VARIABLE = "PD_GRAPH_RUN"
"""Marks every process of a run, so that what is left of it can be found whatever became of who started it."""
CONTROL_VARIABLE = "PD_GRAPH_CONTROL"
"""Where the processes of a run find its supervisor: the folder of the run."""
PLANS_VARIABLE = "PD_GRAPH_PLANS"
"""Which components the planner of a run may start and end workers of: names, with commas between."""
FOLDER_VARIABLE = "VLLM_PD_RUN_DIR"
DEFAULT_GRACE_S = 45.0
LOCK_WAIT_S = 2.0
"""For whoever means to keep the lock."""
_LOCK_POLL_S = 0.02
_BOOT_ID = PROC / "sys" / "kernel" / "random" / "boot_id"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one graph on this host."""

    path: Path

    @property
    def graph(self) -> str:
        return self.path.name

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def record(self) -> Path:
        return self.path / "processes"

    def log(self, instance: str) -> Path:
        """The log of one process."""
        return self.logs / f"{instance}.log"

    def make(self) -> RunFolder:
        """Make it, so that only its owner can enter. Raises GraphError when that cannot be had."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self.logs.mkdir(exist_ok=True)
            mine = self.path.stat()
        except OSError as e:
            raise GraphError(
                f"{self.path} cannot be used ({e.strerror}); set {FOLDER_VARIABLE} to a folder of yours."
            ) from None
        if mine.st_uid != os.geteuid() or stat.S_IMODE(mine.st_mode) & 0o077:
            raise GraphError(f"{self.path} can be entered by others; set {FOLDER_VARIABLE} to a folder of yours.")
        return self

    def lock(self, *, wait_s: float = 0.0) -> int | None:
        """Take the lock; a file descriptor that holds it until closed, None when somebody else has it.

        `wait_s`: seconds to try; whoever only looks whether it is held (`is_locked`) holds it for a moment, too.
        """
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_LOCK_POLL_S)
                    continue
                os.close(handle)
                return None
            return handle

    def is_locked(self) -> bool:
        """Whether a supervisor or a guard works for it."""
        if not (self.path / "lock").exists():
            return False
        handle = self.lock()
        if handle is not None:
            os.close(handle)
        return handle is None

    @contextlib.contextmanager
    def socket_address(self) -> Iterator[str]:
        """The control socket under a name that is short enough for one, however deep the folder lies."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{folder}/control.sock"
        finally:
            os.close(folder)


def root(environ: Mapping[str, str]) -> Path:
    """The folder of all graphs of this user on this host."""
    base = environ.get(FOLDER_VARIABLE)
    if not base:
        state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".local/state")
        base = str(Path(state) / "vllm-pd")
    # A home folder may be that of several hosts.
    return Path(base).absolute() / (socket.gethostname() or "localhost")


def folder_of(graph: str, environ: Mapping[str, str]) -> RunFolder:
    """The folder of a graph, which need not exist."""
    return RunFolder(root(environ) / graph)


def known(environ: Mapping[str, str]) -> list[RunFolder]:
    """Folders of graphs that run, or that were left by a supervisor that was killed."""
    return [folder for folder in ever(environ) if folder.record.exists() or folder.is_locked()]


def ever(environ: Mapping[str, str]) -> list[RunFolder]:
    """Folders of graphs that run or ran."""
    base = root(environ)
    return [RunFolder(path) for path in sorted(base.iterdir())] if base.is_dir() else []


class Started(msgspec.Struct, frozen=True):
    """One process of a run, by pid and start time: a pid alone may have become somebody else's."""

    name: str
    pid: int
    started: int
    grace_s: float = DEFAULT_GRACE_S
    """What it may take to finish what it does."""

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.started)


class Record(msgspec.Struct, frozen=True):
    """What a run has started and not ended."""

    run: str
    """Its id, which all its processes have in their environment."""
    boot: str
    """Of the machine: after it was started anew the processes are gone and their pids are others'."""
    processes: tuple[Started, ...] = ()

    @property
    def grace_s(self) -> float:
        """What the slowest of them may take to finish what it does."""
        return max((started.grace_s for started in self.processes), default=DEFAULT_GRACE_S)


def boot_id() -> str:
    """Of this start of the machine."""
    return _BOOT_ID.read_text().strip()


def write_record(folder: RunFolder, record: Record) -> None:
    """Replace the record at once or not at all. Raises OSError."""
    scratch = folder.record.with_suffix(".new")
    scratch.write_bytes(msgspec.json.encode(record))
    scratch.replace(folder.record)


def read_record(folder: RunFolder) -> Record | None:
    """What the last supervisor wrote; None if there is none, or if the machine was started anew since."""
    try:
        record = msgspec.json.decode(folder.record.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None
    return record if record.boot == boot_id() else None
