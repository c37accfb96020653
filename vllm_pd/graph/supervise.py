"""The supervisor as a process: `python -m vllm_pd.graph.supervise`, started by `launcher`.

Its first line of input says what to run, its first line of output whether it does. After that it is asked over its
control socket. It ends when told so, at SIGTERM, SIGINT or SIGHUP (twice: at once), and, unless it is to stay, when its
input closes: when whoever started it is gone. If it is killed, its guard ends what it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from vllm_pd.errors import GraphError, PDError
from vllm_pd.graph import control, machine, read, remains, runs
from vllm_pd.graph.check import check
from vllm_pd.graph.control import Reply
from vllm_pd.graph.control_server import ControlServer
from vllm_pd.graph.runs import RunFolder
from vllm_pd.graph.supervisor import Supervisor

_GUARD_EVERY_S = 2.0
_GUARD_END_S = 10.0
_LONGEST_LINE = 1 << 16

_log = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True):
    """What is to be run."""

    graph: dict[str, Any]
    """As `read.to_mapping` makes it."""
    folder: str
    programs: str
    stays: bool
    """Whether it goes on when whoever started it is gone."""


class _Process:
    """Everything around the supervisor that makes it a process."""

    def __init__(self, order: Order, lock: int) -> None:
        self._order = order
        self._lock = lock
        self._folder = RunFolder(Path(order.folder))
        self._stop = asyncio.Event()
        self._guard: subprocess.Popen[bytes] | None = None
        graph = check(read.from_mapping(order.graph, "the graph"))
        self._supervisor = Supervisor(
            graph,
            machine.detect(),
            self._folder,
            programs=Path(order.programs),
            environ=dict(os.environ),
            run=secrets.token_hex(8),
        )

    async def run(self) -> None:
        """From the start to the end of the graph. Raises PDError when it cannot be started."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._told_to_stop)
        if not self._order.stays:
            loop.add_reader(0, self._read_input)
        self._start_guard()
        try:
            await self._serve()
        finally:
            # What is left on the record, it ends now.
            await loop.run_in_executor(None, self._end_guard)

    async def _serve(self) -> None:
        try:
            await self._supervisor.start()
        except PDError:
            # Nothing was started.
            self._folder.record.unlink(missing_ok=True)
            raise
        async with ControlServer(self._folder, self._supervisor, self._stop):
            _answer(Reply(ok=True))
            await self._until_told()
            left = await self._supervisor.stop()
        if not left:
            self._folder.record.unlink(missing_ok=True)
        _log.info("ended; left behind: %s", ", ".join(sorted(left)) or "nothing")

    async def _until_told(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GUARD_EVERY_S):
                    await self._stop.wait()
            if self._guard is None or self._guard.poll() is not None:
                _log.warning("the guard is gone; starting another one")
                try:
                    self._start_guard()
                except OSError as e:
                    # The machine is short of processes or memory now; it is tried again.
                    _log.warning("no guard can be started: %s", e)

    def _told_to_stop(self) -> None:
        if self._stop.is_set():
            # The second time means now.
            self._supervisor.hurry.set()
        self._stop.set()

    def _read_input(self) -> None:
        if not os.read(0, _LONGEST_LINE):
            asyncio.get_running_loop().remove_reader(0)
            _log.info("whoever started this graph is gone")
            self._stop.set()

    # The guard.

    def _start_guard(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "vllm_pd.graph.guard", str(self._folder.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=sys.stderr,
            start_new_session=True,
            pass_fds=(self._lock,),
        )

    def _end_guard(self) -> None:
        """Its work, if there is any left, is done when this returns, or goes on without us."""
        guard = self._guard
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(_GUARD_END_S)


def _answer(reply: Reply) -> None:
    """Tell whoever started this process; from then on standard output is the log too."""
    os.write(1, control.encode(reply))
    os.dup2(2, 1)


def _lock(folder: RunFolder) -> int:
    lock = folder.lock(wait_s=runs.LOCK_WAIT_S)
    if lock is None:
        raise GraphError(
            f"The graph {folder.graph} is up already, or what it left is being ended; see vllm-pd status "
            f"{folder.graph}, and vllm-pd down {folder.graph} ends it."
        )
    return lock


def _run(order: Order) -> None:
    folder = RunFolder(Path(order.folder)).make()
    lock = _lock(folder)
    try:
        # Only where a guard was killed too is there anything left of an earlier run.
        if (record := runs.read_record(folder)) is not None:
            remains.end(record)

        async def supervise() -> None:
            await _Process(order, lock).run()

        asyncio.run(supervise())
    finally:
        os.close(lock)


def main() -> int:
    """Returns 0 when the graph was ended as it should, 1 when it could not be started."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    line = bytearray()
    # Byte by byte: what follows the line is not ours to read yet.
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    try:
        _run(msgspec.json.decode(bytes(line), type=Order))
    except PDError as e:
        _answer(Reply(ok=False, detail=str(e), is_setting=isinstance(e, ValueError)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
