"""What the disk is to finish while writing goes on: a thread for one job at a time, in the order in which they came."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(f"vllm.{__name__}")


class Behind:
    """For one user thread. A job that hangs holds up the next one and `wait`; its thread dies with the process."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._size = 0
        self._error: OSError | None = None

    @property
    def at_work(self) -> int:
        """Bytes whose job is not over: a power cut may lose them. For any thread."""
        thread = self._thread
        return self._size if thread is not None and thread.is_alive() else 0

    def begin(self, job: Callable[[], None], size: int) -> None:
        """Start a job for `size` bytes, once the one before is over. What it raises is for `wait`."""
        self._join()
        self._size = size
        thread = threading.Thread(target=self._run, args=(job,), name="vllm_pd_ssd_seal", daemon=True)
        thread.start()
        self._thread = thread

    def wait(self) -> OSError | None:
        """Until the job that is under way is over. Returns the last error that was not told yet."""
        self._join()
        error, self._error = self._error, None
        return error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except OSError as e:
            self._error = e
        except Exception as e:
            logger.exception("SSD tier: a segment could not be finished.")
            self._error = OSError(errno.EIO, repr(e))
