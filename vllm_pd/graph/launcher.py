"""Starts a graph on this machine, watches it come up, and ends it; for commands, scripts and tests.

with running(graph) as cluster:
    ask(cluster.status().url)
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm_pd.errors import GraphError, SettingsError
from vllm_pd.graph import control, read, remains, runs
from vllm_pd.graph.check import check
from vllm_pd.graph.control import Reply, Stop
from vllm_pd.graph.model import Graph
from vllm_pd.graph.ports import is_listening
from vllm_pd.graph.process import Leftovers
from vllm_pd.graph.runs import RunFolder
from vllm_pd.graph.status import GraphStatus, Phase
from vllm_pd.graph.supervise import Order

_BEGIN_S = 75.0
"""Until the supervisor says whether it starts, beside what an earlier one left and may take to end first."""
_DOWN_S = 90.0
"""To end a graph, beside what its processes may take."""
_REAP_S = 60.0
"""For a supervisor that has nothing to do any more."""
_POLL_S = 0.2

Watch = Callable[[GraphStatus], None]
"""Gets the status several times a second. It may raise."""


@dataclass(slots=True)
class Cluster:
    """A graph that was started here."""

    folder: RunFolder
    supervisor: subprocess.Popen[bytes]

    def status(self) -> GraphStatus:
        """How it is. Raises GraphError when it is not up any more."""
        return control.status(self.folder)

    def leave_alone(self) -> None:
        """It goes on without this process; only one that was started to stay does."""
        _let_go(self.supervisor)


def start(
    graph: Graph, *, stays: bool = False, environ: Mapping[str, str] | None = None, programs: Path | None = None
) -> Cluster:
    """Have a graph started; returns as soon as its supervisor has begun.

    Args:
        stays: it goes on when this process has ended; otherwise it ends with it, even if it is killed.
        environ: None: that of this process.
        programs: folder of `vllm`, `vllm-pd-router` and `vllm-pd`; None: that of the running Python.

    Raises:
        SettingsError, GraphError: it cannot be started; nothing is left.
    """
    check(graph)
    environ = dict(os.environ if environ is None else environ)
    folder = runs.folder_of(graph.name, environ).make()
    folder_of_programs = programs if programs is not None else Path(sys.executable).parent
    order = Order(read.to_mapping(graph), str(folder.path), str(folder_of_programs), stays)
    with folder.log("supervisor").open("ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "vllm_pd.graph.supervise"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environ,
            # A Ctrl-C in the terminal is for whoever watches, who then says how everything is to end.
            start_new_session=True,
        )
    assert supervisor.stdin is not None and supervisor.stdout is not None
    try:
        # One that has ended already is known by the answer that it does not give.
        with contextlib.suppress(BrokenPipeError):
            supervisor.stdin.write(msgspec.json.encode(order) + b"\n")
            supervisor.stdin.flush()
        reply = _first_line(supervisor, folder, _BEGIN_S + _grace_of(folder))
    except BaseException:
        _let_go(supervisor)
        raise
    finally:
        supervisor.stdout.close()
    if not reply.ok:
        _let_go(supervisor)
        reap(supervisor)
        raise (SettingsError if reply.is_setting else GraphError)(reply.detail)
    return Cluster(folder, supervisor)


def wait_until_up(folder: RunFolder, *, watch: Watch = lambda status: None) -> GraphStatus:
    """Wait until everything is ready, or was given up, for which the graph has its deadlines; returns the status then.

    Raises:
        GraphError: the graph ended.
    """
    while True:
        status = control.status(folder)
        watch(status)
        if is_settled(status):
            return status
        time.sleep(_POLL_S)


def is_settled(status: GraphStatus) -> bool:
    """Whether waiting longer changes nothing: every process was ready, was given up, or waits for one that was."""
    ends = (Phase.READY, Phase.UNREADY, Phase.GIVEN_UP)
    return all(i.phase in ends or i.is_stuck for i in status.instances)


def stop(
    folder: RunFolder, *, now: bool = False, watch: Watch = lambda status: None, deadline_s: float | None = None
) -> Leftovers:
    """End a graph, wait until it has ended, and look what it left. Idempotent. What it says goes to `watch`.

    Args:
        deadline_s: None: as long as its processes may take to finish what they have, and some more.

    Raises:
        GraphError: it did not end in time.
    """
    last: GraphStatus | None = None
    is_told = False
    # Frontends end before workers do.
    limit_s = deadline_s if deadline_s is not None else _DOWN_S + 2 * _grace_of(folder)
    began = time.monotonic()
    while True:
        with contextlib.suppress(GraphError):
            last = control.status(folder)
            if not is_told:
                # One that has just begun does not listen yet, and one that is busy may answer late.
                control.ask(folder, Stop(now))
                is_told = True
                if deadline_s is None:
                    slowest = max((i.grace_s for i in last.instances), default=0.0)
                    limit_s = time.monotonic() - began + _DOWN_S + 2 * slowest
            watch(last)
        if not folder.is_locked():
            return _look(folder, last)
        if time.monotonic() - began > limit_s:
            raise GraphError(
                f"The graph {folder.graph} did not end within {limit_s:.0f} s; try vllm-pd down --now, "
                f"and see {folder.log('supervisor')}."
            )
        time.sleep(_POLL_S)


def clean(folder: RunFolder, *, waiting: Callable[[int], None] = lambda left: None) -> bool:
    """End what a supervisor and its guard left that were both killed. Returns whether there was anything.

    Raises:
        GraphError: something does not end, not even killed.
    """
    lock = folder.lock(wait_s=runs.LOCK_WAIT_S) if folder.path.is_dir() else None
    if lock is None:
        return False
    try:
        record = runs.read_record(folder)
        found = record is not None and bool(remains.living(record))
        if record is not None:
            remains.end(record, waiting=waiting)
            if left := remains.living(record):
                pids = ", ".join(str(process.pid) for process in left)
                raise GraphError(
                    f"Of the graph {folder.graph} the processes {pids} do not end; they hang in the kernel."
                )
        folder.record.unlink(missing_ok=True)
        (folder.path / "control.sock").unlink(missing_ok=True)
    finally:
        os.close(lock)
    return found


@contextlib.contextmanager
def running(
    graph: Graph, *, environ: Mapping[str, str] | None = None, programs: Path | None = None, watch: Watch | None = None
) -> Iterator[Cluster]:
    """A graph that is up while the block runs. Raises GraphError when something in it does not come up."""
    cluster = start(graph, environ=environ, programs=programs)
    try:
        failed = failures(wait_until_up(cluster.folder, watch=watch or (lambda status: None)))
        if failed:
            raise GraphError("\n".join(failed))
        yield cluster
    finally:
        stop(cluster.folder)
        cluster.leave_alone()
        reap(cluster.supervisor)


def failures(status: GraphStatus) -> list[str]:
    """What did not come up, with the end of its log."""
    out = []
    for i in status.instances:
        if i.phase is Phase.GIVEN_UP:
            end = "".join(f"\n    {line}" for line in i.log_end)
            out.append(f"{i.name} {i.detail}; its log is {i.log}" + (f" and ends with{end}" if end else "."))
        elif i.phase is Phase.WAITING:
            out.append(f"{i.name} was not started; it waits {i.detail}.")
    return out


def reap(supervisor: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a supervisor that has nothing to do any more; one that hangs is killed."""
    try:
        supervisor.wait(_REAP_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait(_REAP_S)


def _let_go(supervisor: subprocess.Popen[bytes]) -> None:
    if supervisor.stdin is not None:
        # What could not be written to one that has ended is not written now.
        with contextlib.suppress(OSError):
            supervisor.stdin.close()


def _grace_of(folder: RunFolder) -> float:
    """What the processes on its record may take to end; without one, what is usual."""
    record = runs.read_record(folder)
    return record.grace_s if record is not None else runs.DEFAULT_GRACE_S


def _first_line(supervisor: subprocess.Popen[bytes], folder: RunFolder, within_s: float) -> Reply:
    assert supervisor.stdout is not None
    ready, _, _ = select.select([supervisor.stdout], [], [], within_s)
    line = supervisor.stdout.readline() if ready else b""
    if not line:
        supervisor.kill()
        supervisor.wait()
        raise GraphError(f"The supervisor did not begin; its log is {folder.log('supervisor')}.")
    return control.decode_reply(line)


def _look(folder: RunFolder, last: GraphStatus | None) -> Leftovers:
    """What is left of a graph that has ended."""
    record = runs.read_record(folder)
    left = remains.living(record) if record is not None else frozenset()
    names = {started.id: started.name for started in record.processes} if record is not None else {}
    ports = [int(i.url.rpartition(":")[2]) for i in last.instances if i.url] if last is not None else []
    return Leftovers(
        processes=tuple(f"{names.get(process, 'one')} ({process.pid})" for process in left),
        ports=tuple(port for port in ports if is_listening(port)),
    )
