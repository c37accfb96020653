"""One line that says which slow step runs, for how long, and what it does. Standard library only."""

from __future__ import annotations

import shutil
import sys
import time

TTY_REFRESH_S = 0.5
PLAIN_REFRESH_S = 20.0


class StatusLine:
    """Redrawn in place on a terminal; elsewhere a new line now and then."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._started = time.monotonic()
        self._is_tty = sys.stdout.isatty()
        self._next = 0.0 if self._is_tty else self._started + PLAIN_REFRESH_S

    @property
    def seconds(self) -> float:
        """Since the step began."""
        return time.monotonic() - self._started

    def show(self, detail: str) -> None:
        """Say what the step does now; most calls print nothing."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (TTY_REFRESH_S if self._is_tty else PLAIN_REFRESH_S)
        text = f"  {self._title}, {self.seconds:.0f} s: {' '.join(detail.split())}"
        if self._is_tty:
            print(f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        else:
            print(text[:160], flush=True)

    def done(self, outcome: str = "done") -> None:
        """Replace the line by the step's outcome."""
        start = "\r\x1b[2K" if self._is_tty else ""
        print(f"{start}  {self._title}: {outcome} ({self.seconds:.0f} s)", flush=True)

    def clear(self) -> None:
        """Make room for a line of somebody else's."""
        if self._is_tty:
            print("\r\x1b[2K", end="", flush=True)
            self._next = 0.0
