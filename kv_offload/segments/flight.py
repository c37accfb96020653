"""A batch on its way to the disk, written by a thread of its own."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence

from vllm_pd.kv_offload.block_io.base import BlockIO, Piece
from vllm_pd.kv_offload.segments.batch import Batch

logger = logging.getLogger(f"vllm.{__name__}")

IN_FLIGHT = 2
"""The disk has the next batch when one is over: the last requests of a batch do not fill it, and between two it would
have nothing to do. 1 MiB blocks were written at 0.9 of the bare disk's speed with two, at 0.77 with one (a virtual NVMe
disk); a third gave no more."""

Ended = Callable[[OSError | None], None]
"""Told the end of a batch: None when its blocks are in the index."""


class Flight:
    """
    Args:
        pieces: of the batch, header included.
        at: where it begins in the file.
        ended: for whoever waits for it; not called here.
        wake: called in the thread of the flight, last.

    Attributes:
        over: `wait` does not wait any more, or next to nothing.
    """

    def __init__(
        self, io: BlockIO, batch: Batch, pieces: Sequence[Piece], at: int, ended: Ended, wake: Callable[[], None]
    ) -> None:
        self.batch = batch
        self.at = at
        self.bytes = batch.disk_bytes
        self.ended = ended
        self._io = io
        self._pieces = pieces
        self._wake = wake
        # Whatever ends the thread early, nothing was written then.
        self._error: OSError | None = OSError(errno.EIO, "the writing thread failed")
        self.over = False
        self._thread = threading.Thread(target=self._run, name="vllm_pd_ssd_batch", daemon=True)
        self._thread.start()

    def wait(self) -> OSError | None:
        """What became of it. Hangs as long as the disk does; the memory may be used again afterwards."""
        self._thread.join()
        return self._error

    def _run(self) -> None:
        try:
            errors = self._io.write(self._pieces)
            self._error = next((error for error in errors if error is not None), None)
        except OSError as e:
            self._error = e
        except Exception:
            logger.exception("SSD tier: a batch could not be written.")
        finally:
            self.over = True
            self._wake()
