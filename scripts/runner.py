"""Runs the steps of an installation one after another: one line of progress for each, all of their output in a log."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_pd.status_line import StatusLine

ROOT = Path(__file__).resolve().parent.parent
PAUSE_S = 5.0
STEP_TIMEOUT_S = 3600.0
SHOWN_LINES = 12
READ_S = 0.5
# Trying again does not help when the registry has answered.
FINAL_ANSWERS = (
    "No matching distribution",
    "ResolutionImpossible",
    "No solution found",
    "No space left",
    "Permission denied",
)


class InstallError(Exception):
    """One step failed. `tail` holds the last lines of what it printed."""

    def __init__(self, message: str, tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tail = list(tail)


class Runner:
    """Runs commands one after another, showing one line of progress and writing everything to the log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")

    def run(
        self, title: str, command: Sequence[str], *, attempts: int = 1, variables: Mapping[str, str] | None = None
    ) -> None:
        """Run it, up to `attempts` times; `variables` are added to its environment.

        Raises:
            InstallError: it failed every time, or gave an answer that a repetition will not change.
        """
        for attempt in range(1, attempts + 1):
            shown = title if attempt == 1 else f"{title} (attempt {attempt} of {attempts})"
            status, tail = self._once(shown, command, variables or {})
            if status == 0:
                return
            final = any(answer in line for line in tail for answer in FINAL_ANSWERS)
            if attempt == attempts or final:
                raise InstallError(f"The step {title!r} failed with status {status}.", tail[-SHOWN_LINES:])
            time.sleep(PAUSE_S * attempt)

    def _once(self, title: str, command: Sequence[str], variables: Mapping[str, str]) -> tuple[int, list[str]]:
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        tail: list[str] = []
        with self.log.open("a") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            process = subprocess.Popen(
                list(command),
                cwd=ROOT,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            reader = threading.Thread(target=_read_lines, args=(process, lines), daemon=True)
            reader.start()
            status = StatusLine(title)
            try:
                open_end = True
                while open_end:
                    try:
                        line = lines.get(timeout=READ_S)
                    except queue.Empty:
                        line = ""
                    open_end = line is not None
                    if line:
                        log.write(line)
                        tail = [*tail[-200:], line.rstrip()]
                    status.show(tail[-1] if tail else "")
                    if status.seconds > STEP_TIMEOUT_S:
                        raise InstallError(f"The step {title!r} took more than {STEP_TIMEOUT_S:.0f} s.", tail[-12:])
                code = process.wait()
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            status.done("done" if code == 0 else "failed")
        return code, tail


def _read_lines(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)
