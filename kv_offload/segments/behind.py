"""What the disk is to finish while writing goes on: a thread for one job at a time, in the order in which they came."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Behind:
    """For one user thread. A job that hangs holds up the next one, and nobody else; its thread dies with the process.

    Attributes:
        at_work: bytes whose job is not known to be over: a power cut may lose them.
    """

    def __init__(self) -> None:
        self.at_work = 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def begin(self, job: Callable[[], None], size: int) -> None:
        """Start a job for `size` bytes, once the one before is over. What it raises is for `settle`."""
        self._join()
        self.at_work = size
        self._thread = threading.Thread(target=self._run, args=(job,), name="vllm_pd_ssd_sync", daemon=True)
        self._thread.start()

    def settle(self, *, wait: bool) -> None:
        """
        Args:
            wait: for the job that is under way.

        Raises:
            OSError: a job failed with it; told once.
        """
        if wait or (self._thread is not None and not self._thread.is_alive()):
            self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread, self.at_work = None, 0

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except OSError as e:
            self._error = e
