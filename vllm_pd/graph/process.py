"""One server process: started with a log file, waited for, and ended together with everything it started.

The process leads a session of its own. A Ctrl-C in the terminal therefore reaches only the launcher, which ends its
processes in order; and the session is how children are found again after their parent died.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from vllm_pd.errors import PDError
from vllm_pd.graph import proc_tree
from vllm_pd.graph.proc_tree import ProcessId

Ready = str | Callable[[], bool]
"""A URL that answers 200 once the process can serve, or a function that says so."""

DEFAULT_GRACE_S = 30.0
_POLL_S = 0.1
_PROBE_TIMEOUT_S = 2.0
_REAP_S = 10.0
_TAIL_LINES = 15
_TAIL_BYTES = 262144
_CAUSE_LENGTH = 400
_EXCEPTION = re.compile(r"\b[A-Za-z_.]+(?:Error|Exception): .+")
_NO_CAUSE = re.compile(r"\b(?:WARNING|INFO|DEBUG)\b")
"""What did not end a process, although it may name an exception as an example."""

# Without a proxy handler, http_proxy in the environment would send loopback probes to a proxy.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ProcessError(PDError):
    """A process died, or was not ready in time; the message holds the end of its log and names the file."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run.

    Attributes:
        name: how messages call it.
        command: program and arguments.
        log: file for its output; its folder is made. An earlier content is kept, the new run is appended.
        env: the whole environment; None inherits ours.
        cwd: working folder; None inherits ours.
    """

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str] | None = None
    cwd: Path | None = None


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a cluster left on the machine; false when it left nothing."""

    processes: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    shared_memory: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.ports or self.shared_memory)

    def __str__(self) -> str:
        parts = [f"process {name}" for name in self.processes]
        parts += [f"port {port}" for port in self.ports]
        return ", ".join([*parts, *self.shared_memory]) or "nothing"


@dataclass(slots=True)
class _Seen:
    """What the process was ever seen to own: needed after it died to tell what it left."""

    processes: set[ProcessId] = field(default_factory=set)
    shm: set[str] = field(default_factory=set)


class ManagedProcess:
    """Starts, watches and ends one process. Not thread-safe. `with` starts it and always ends it."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self._popen: subprocess.Popen[bytes] | None = None
        self._leader: ProcessId | None = None
        self._log_start = 0
        self._seen = _Seen()

    def __repr__(self) -> str:
        return f"ManagedProcess({self.spec.name!r}, pid={self.pid}, running={self.is_running})"

    @property
    def pid(self) -> int:
        """Process id; 0 before the first start."""
        return self._popen.pid if self._popen is not None else 0

    @property
    def leader(self) -> ProcessId | None:
        """The process itself, told from a later one with the same pid; None before the first start."""
        return self._leader

    @property
    def is_running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs and before the first start."""
        return self._popen.poll() if self._popen is not None else None

    def start(self) -> ManagedProcess:
        """Start it; returns at once. Does nothing if it runs; starts it again if it ended.

        Raises:
            ProcessError: the program cannot be run.
        """
        if self.is_running:
            return self
        self.stop(grace_s=0)
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._popen = subprocess.Popen(
                    list(self.spec.command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(self.spec.env) if self.spec.env is not None else None,
                    cwd=self.spec.cwd,
                    start_new_session=True,
                )
            except OSError as e:
                program = self.spec.command[0]
                raise ProcessError(f"{self.spec.name} cannot be started: {program}: {e.strerror}.") from None
        self._leader = proc_tree.identify(self._popen.pid)
        return self

    def probe(self, ready: Ready) -> bool:
        """Ask once whether it is ready.

        Raises:
            ProcessError: it does not run any more.
        """
        if not self.is_running:
            cause = f" ({found})" if (found := self.cause()) else ""
            raise ProcessError(
                f"{self.spec.name} ended with status {self.returncode} before it was ready{cause}; {self._last_words()}"
            )
        return ready() if callable(ready) else _answers_ok(ready)

    def wait_ready(
        self, ready: Ready, *, deadline_s: float, progress: Callable[[float], None] | None = None
    ) -> ManagedProcess:
        """Wait until it is ready. `progress` gets the seconds waited, several times a second.

        Raises:
            ProcessError: it died (at once, not at the deadline) or was not ready after `deadline_s` seconds.
        """
        started = time.monotonic()
        while not self.probe(ready):
            waited = time.monotonic() - started
            if waited > deadline_s:
                self.give_up(deadline_s)
            if progress is not None:
                progress(waited)
            time.sleep(_POLL_S)
        self.observe()
        return self

    def give_up(self, deadline_s: float) -> NoReturn:
        """Raise the ProcessError that says it was not ready after `deadline_s` seconds."""
        raise ProcessError(f"{self.spec.name} was not ready after {deadline_s:.0f} s; {self._last_words()}")

    def tail(self, lines: int = _TAIL_LINES) -> list[str]:
        """The last lines that this run wrote to its log."""
        return self._log_lines()[-lines:]

    def cause(self) -> str:
        """The first exception in the end of its log, on one line; empty if there is none.

        A server of several processes reports the failure of one once more in each of the others, so the last lines
        seldom hold the reason.
        """
        for line in self._log_lines():
            if (match := _EXCEPTION.search(line)) and not _NO_CAUSE.search(line[: match.start()]):
                return match[0][:_CAUSE_LENGTH]
        return ""

    def _log_lines(self) -> list[str]:
        try:
            with self.spec.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                # A log that was cut because it had grown too long holds nothing of earlier runs.
                start = self._log_start if self._log_start <= size else 0
                log.seek(max(start, size - _TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    def observe(self) -> None:
        """Remember the children and the shared memory it has now, so that `stop` and `leftovers` know them."""
        if self._leader is None:
            return
        members = proc_tree.family(self._leader)
        self._seen.processes |= members
        self._seen.shm |= proc_tree.made_since(proc_tree.shared_memory(members), self._leader.started)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM to the process alone: it ends its children in its own order). Returns at once."""
        self.observe()
        if self._popen is not None and self._popen.poll() is None:
            # A paused process cannot act on SIGTERM.
            self._popen.send_signal(signal.SIGTERM)
            self._popen.send_signal(signal.SIGCONT)

    def stop(self, *, grace_s: float = DEFAULT_GRACE_S) -> int | None:
        """End it and everything it started. Idempotent. Returns its exit status, None if it never ran.

        SIGTERM, up to `grace_s` seconds for the process to end, then SIGKILL for whatever is left of its family.
        """
        if self._popen is None:
            return None
        if self._popen.poll() is None and grace_s > 0:
            self.terminate()
            try:
                self._popen.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass
            except BaseException:
                self.kill()
                raise
        return self.kill()

    def kill(self) -> int | None:
        """SIGKILL for it and everything it started, as a crash would do. Idempotent; waits until they are gone."""
        if self._popen is None:
            return None
        deadline = time.monotonic() + _REAP_S
        while True:
            self.observe()
            left = {process for process in self._seen.processes if proc_tree.is_alive(process)}
            proc_tree.send(left, signal.SIGKILL)
            # A leader whose other threads are still dying looks dead but cannot be reaped yet.
            reaped = self._popen.poll() is not None
            if (reaped and not left) or time.monotonic() > deadline:
                return self._popen.returncode
            time.sleep(0.01)

    def left_processes(self) -> frozenset[ProcessId]:
        """Members of its family that still run."""
        return frozenset(process for process in self._seen.processes if proc_tree.is_alive(process))

    def left_shared_memory(self) -> frozenset[str]:
        """Files in /dev/shm that its family was seen to use, that are not older than it, that still exist, and that no
        other program uses: a cache server's memory, which workers map, is not theirs to leave or to remove."""
        left = frozenset(path for path in self._seen.shm if Path(path).exists())
        if not left:
            return left
        return left - proc_tree.shared_memory(proc_tree.everyone() - self._seen.processes)

    def __enter__(self) -> ManagedProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _last_words(self) -> str:
        lines = "\n".join(f"  {line}" for line in self.tail())
        return f"its log is {self.spec.log} and ends with\n{lines}" if lines else f"its log {self.spec.log} is empty."


def _answers_ok(url: str) -> bool:
    try:
        with _direct.open(url, timeout=_PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False
