"""Logs of a graph's processes: kept from growing without bounds, and read by people."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

LONGEST = 64 << 20
"""Bytes of one log; then its content becomes the older part, and it begins anew."""
_TAIL_BYTES = 1 << 20


async def keep_short(folder: Path, every_s: float, threads: Executor) -> None:
    """Cut logs in the folder that are too long, again and again, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        await asyncio.get_running_loop().run_in_executor(threads, cut, folder)


def cut(folder: Path, *, longest: int = LONGEST) -> list[str]:
    """Cut the logs that are too long now; returns their names.

    Copied and emptied rather than renamed: the processes keep their files open, and append. What they write between
    the copy and the cut, some microseconds, is lost.
    """
    done = []
    for log in folder.glob("*.log"):
        with contextlib.suppress(OSError):
            if log.stat().st_size > longest:
                older = log.with_name(f"{log.name}.1")
                try:
                    shutil.copyfile(log, older)
                except OSError:
                    # A disk that is full must not stay so because of logs.
                    older.unlink(missing_ok=True)
                with log.open("r+b") as file:
                    file.truncate(0)
                done.append(log.name)
    return done


@dataclass(slots=True)
class Follower:
    """Reads what comes into one log."""

    path: Path
    name: str
    _at: int = 0
    _rest: bytes = field(default=b"")

    def last(self, lines: int) -> list[str]:
        """The last lines so far; `more` goes on behind them."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _TAIL_BYTES))
                data = file.read()
        except OSError:
            return []
        self._at = size
        return data.decode(errors="replace").splitlines()[-lines:] if lines else []

    def more(self) -> list[str]:
        """Whole lines that came since. A log that was cut is read from its beginning."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._at:
                    self._at, self._rest = 0, b""
                file.seek(self._at)
                data = file.read(_TAIL_BYTES)
        except OSError:
            return []
        self._at += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def chosen(folder: Path, names: Sequence[str]) -> list[Follower]:
    """The logs of the named instances or components (`decode` means all of `decode-0`, ...); all for no names."""
    logs = sorted(folder.glob("*.log"))
    if names:
        logs = [log for log in logs if any(log.stem == n or log.stem.rpartition("-")[0] == n for n in names)]
    return [Follower(log, log.stem) for log in logs]
