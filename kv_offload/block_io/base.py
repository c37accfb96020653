"""The protocol between what lays blocks out on a disk and what moves the bytes.

A failure is data here, not an exception: a batch holds pieces of several requests, and one bad sector must not take the
others along. What is not reported as an error was moved whole; a checksum over the contents is the caller's.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class OpenFile:
    """A file open for reading and writing. Backends create it; others only look at its attributes and close it.

    `close` may come while another thread reads: the descriptor itself is closed after the last operation on it. Were it
    closed at once, its number could be given to the next file, and the reader would take in bytes of that one.

    Attributes:
        path: where it was opened; it may have been deleted since.
        alignment: offsets, addresses and lengths must be multiples of it; 1 where anything goes.
        direct: it bypasses the page cache (O_DIRECT). False on tmpfs and other file systems that refuse it.
    """

    __slots__ = ("_closed", "_fd", "_lock", "_users", "alignment", "direct", "path")

    def __init__(self, path: Path, fd: int, *, alignment: int, direct: bool) -> None:
        self.path = path
        self.alignment = alignment
        self.direct = direct
        self._fd = fd
        self._users = 0
        self._closed = False
        self._lock = threading.Lock()

    def acquire(self) -> int:
        """The descriptor, valid until `release`. For backends.

        Raises:
            OSError: EBADF, the file was closed.
        """
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "file is closed", str(self.path))
            self._users += 1
            return self._fd

    def release(self) -> None:
        """Ends one `acquire`."""
        with self._lock:
            self._users -= 1
            last = self._closed and self._users == 0
        if last:
            os.close(self._fd)

    def close(self) -> None:
        """No operation begins after this; those under way end as they would. Does not sync. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._users == 0
        if idle:
            os.close(self._fd)

    def __repr__(self) -> str:
        return f"OpenFile({str(self.path)!r}, alignment={self.alignment}, direct={self.direct})"


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes between `address` in this process' memory and `offset` of `file`, multiples of `file.alignment`.

    The caller guarantees that the memory is valid and stays so until the call that was given the piece has returned.
    """

    file: OpenFile
    offset: int
    address: int
    length: int


class BlockIO(Protocol):
    """Moves batches between memory and files.

    Every call blocks the calling thread until all its pieces are done; several threads call at once, each with a batch
    of its own. Pieces of a batch may be moved in any order and merged where they are neighbours in file and memory;
    those of one `write` must not overlap. `read` and `write` never raise for I/O: they return one entry per piece, None
    where all its bytes were moved. After an error the memory (read) or the file's range (write) holds anything.
    """

    name: str
    """Which backend this is, for logs and metrics: "nixl-posix", "threads"."""

    pread: int
    """Address of pread(2) or of a function like it: with it machine code may read files itself (`OpenFile.acquire`)
    where every request is long. What it cannot read is read again by `read`, which says why. 0 where it must not."""

    def open(self, path: Path, *, create_bytes: int | None = None) -> OpenFile:
        """Open a file for reading and writing.

        Args:
            create_bytes: None opens an existing file. Else the file must not exist and is created with mode 0600 and
                this size, all of it reserved on the disk: a full disk shows here and not in the middle of a write.

        Raises:
            OSError: it does not exist, exists already, is not permitted, ENOSPC, ... A file that could not be given its
                size is removed again.
        """
        ...

    def read(self, pieces: Sequence[Piece]) -> list[OSError | None]:
        """Read each piece whole. Fewer bytes than asked for (end of the file) are an EIO error."""
        ...

    def write(self, pieces: Sequence[Piece]) -> list[OSError | None]:
        """Write each piece whole. Durable only after `sync`; readable at once."""
        ...

    def sync(self, file: OpenFile) -> None:
        """Wait until the device has what was written (fdatasync).

        Raises:
            OSError: it does not; what was written since the last sync may be lost.
        """
        ...

    def close(self) -> None:
        """Let threads and agents go, waiting a bounded time for those at work. Later calls fail with EBADF."""
        ...
