"""Tickets that are open, and results that wait to be fetched."""

from __future__ import annotations

import threading
from collections import deque

from vllm_pd.kv_offload.segments.outcome import Finished


class Results:
    """Thread-safe; `take` does not wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended: deque[Finished] = deque()
        self._open = 0

    def opened(self) -> None:
        """A ticket was taken on."""
        with self._changed:
            self._open += 1

    def ended(self, result: Finished) -> None:
        """The end of one that was taken on."""
        with self._changed:
            self._open -= 1
            self._ended.append(result)
            self._changed.notify_all()

    def take(self) -> list[Finished]:
        """All that ended since."""
        taken = []
        while self._ended:
            taken.append(self._ended.popleft())
        return taken

    def wait_for_all(self, timeout_s: float) -> bool:
        """Until no ticket is open; False if one still is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_s)
