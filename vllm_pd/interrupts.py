"""Ctrl-C that is obeyed at chosen places only, so that it never strikes between starting a process and knowing it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The user wants to stop. Not an `Exception`, so that no handler of errors swallows it."""


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP while the `with` block runs.

    `check` raises Interrupted if there was one. Inside `anywhere` the signal itself raises, which ends a blocking
    read or wait at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self._raises = False
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.count:
            raise Interrupted

    @contextlib.contextmanager
    def anywhere(self) -> Iterator[None]:
        """While inside, the signal interrupts whatever runs."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._raises:
            self._raises = False
            raise Interrupted

    def __enter__(self) -> Interrupts:
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
