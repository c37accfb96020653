"""Finds and ends what a supervisor left that could not do it itself, because it was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from vllm_pd.graph import proc_tree
from vllm_pd.graph.proc_tree import PROC, ProcessId
from vllm_pd.graph.runs import RUN_VARIABLE, Record

_KILL_S = 10.0
_POLL_S = 0.1


def living(record: Record) -> frozenset[ProcessId]:
    """Processes of the run that still run: those in the record with their families, and whoever carries its mark.

    The mark finds those that were started a moment before their supervisor was killed; programs that rename
    themselves lose it, and are found as members of a family.
    """
    found: set[ProcessId] = set()
    for started in record.processes:
        found |= proc_tree.family(started.id)
    mark = f"{RUN_VARIABLE}={record.run}".encode()
    for process in proc_tree.everyone():
        if process not in found and _carries(process, mark):
            found |= {process} | proc_tree.family(process)
    return frozenset(found - {proc_tree.identify(os.getpid())})


def end(record: Record, *, waiting: Callable[[int], None] = lambda left: None) -> None:
    """End everything that is left of a run, and remove the shared memory that nobody else uses. Idempotent. Processes
    get as long to finish what they do as their supervisor would have given them.

    Args:
        waiting: gets the number of those that still run, several times a second.
    """
    left = living(record)
    if not left:
        return
    since = min(process.started for process in left | {started.id for started in record.processes})
    memory = set(proc_tree.shared_memory(left))
    # Leaders alone are asked: they end their children in their own order.
    leaders = {started.id for started in record.processes} & left or left
    proc_tree.send(leaders, signal.SIGTERM)
    # A paused process cannot act on SIGTERM.
    proc_tree.send(leaders, signal.SIGCONT)
    deadline = time.monotonic() + record.grace_s
    while (left := living(record)) and time.monotonic() < deadline:
        memory |= proc_tree.shared_memory(left)
        waiting(len(left))
        time.sleep(_POLL_S)
    deadline = time.monotonic() + _KILL_S
    while (left := living(record)) and time.monotonic() < deadline:
        proc_tree.send(left, signal.SIGKILL)
        time.sleep(_POLL_S)
    unused = proc_tree.made_since(memory, since) - proc_tree.shared_memory(proc_tree.everyone())
    for path in unused:
        with contextlib.suppress(OSError):
            Path(path).unlink()


def _carries(process: ProcessId, mark: bytes) -> bool:
    try:
        return mark in (PROC / str(process.pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
