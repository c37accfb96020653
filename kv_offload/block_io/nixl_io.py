"""Moves bytes with NIXL's POSIX backend: a whole batch is in flight at once, for a few calls from Python.

* That pays for many small requests. Of a batch of long ones each is worth a system call of its own, and those of a few
  threads bring more: submitting a long one takes the kernel a while, which libaio does one after the other.
* libaio does buffered I/O inside the submitting call, one request after the other. So only files with O_DIRECT go
  through NIXL; other files, and single requests, through plain system calls (`thread_io`).
* NIXL says of a batch that something failed, not what and why. The pieces of a failed batch are done again by system
  calls, which say it of each. Pieces beyond the end of their file never reach NIXL.
* A queue is for one thread. Each call has an agent of its own while it lasts, from those that are idle; there come to
  be as many as callers at once.

GPUDirect Storage is not used. NIXL's GDS backends move bytes between files and device memory of the calling process.
The process with device memory is vLLM's worker; a tier below the CPU tier is driven by the scheduler's process, which
has no device pointers and is handed host memory by vLLM. From host memory GDS is an ordinary read with a detour.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from vllm_pd.kv_offload.block_io.base import OpenFile, Piece
from vllm_pd.kv_offload.block_io.merge import LONG_BYTES, merge
from vllm_pd.kv_offload.block_io.nixl_agent import QUEUE, NixlAgent, Operation
from vllm_pd.kv_offload.block_io.thread_io import ThreadIO

logger = logging.getLogger(f"vllm.{__name__}")

REQUEST_BYTES = 1 << 20


class NixlIO:
    """`BlockIO` over NIXL.

    Raises:
        OSError: as `NixlAgent`.
    """

    name = "nixl-posix"
    pread = ThreadIO.pread

    def __init__(self) -> None:
        self._idle = [NixlAgent()]
        self._plain = ThreadIO()
        self._lock = threading.Lock()
        self._closed = False
        self._warned = False

    def open(self, path: Path, *, create_bytes: int | None = None) -> OpenFile:
        return self._plain.open(path, create_bytes=create_bytes)

    def read(self, pieces: Sequence[Piece]) -> list[OSError | None]:
        left = self._move(pieces, "READ")
        return _spread(len(pieces), left, self._plain.read([pieces[index] for index in left]) if left else [])

    def write(self, pieces: Sequence[Piece]) -> list[OSError | None]:
        left = self._move(pieces, "WRITE")
        return _spread(len(pieces), left, self._plain.write([pieces[index] for index in left]) if left else [])

    def sync(self, file: OpenFile) -> None:
        self._plain.sync(file)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            agents, self._idle = self._idle, []
        for agent in agents:
            agent.close()
        self._plain.close()

    def _move(self, pieces: Sequence[Piece], operation: Operation) -> list[int]:
        """Moves what NIXL can move; returns the indices of the other pieces, and of those that failed."""
        fds: dict[OpenFile, int] = {}
        try:
            ours = _within_direct_files(pieces, fds)
            requests = merge([pieces[index] for index in ours], most_bytes=REQUEST_BYTES, most_ranges=1)
            long = sum(request.length for request in requests) >= LONG_BYTES * len(requests)
            agent = self._take() if len(requests) > 1 and not long else None
            if agent is None:
                return list(range(len(pieces)))
            moved = [False] * len(pieces)
            try:
                for start in range(0, len(requests), QUEUE):
                    part = requests[start : start + QUEUE]
                    if agent.usable and agent.transfer(operation, part, fds):
                        for request in part:
                            for index in request.pieces:
                                moved[ours[index]] = True
            finally:
                self._give_back(agent)
            return [index for index, done in enumerate(moved) if not done]
        finally:
            for file in fds:
                file.release()

    def _take(self) -> NixlAgent | None:
        """An agent for this call, or None where the kernel gives us no further queue (fs.aio-max-nr)."""
        with self._lock:
            if self._closed:
                return None
            if self._idle:
                return self._idle.pop()
        try:
            return NixlAgent()
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "The kernel may be out of queues for asynchronous I/O (%s); some of it goes through threads, which "
                    "is slower. Raise the sysctl fs.aio-max-nr.",
                    error.strerror,
                )
            return None

    def _give_back(self, agent: NixlAgent) -> None:
        with self._lock:
            if agent.usable and not self._closed:
                self._idle.append(agent)
                return
        agent.close()


def _within_direct_files(pieces: Sequence[Piece], fds: dict[OpenFile, int]) -> list[int]:
    """Indices of the pieces that lie in an open file with O_DIRECT, not beyond its end; fills `fds`, acquired."""
    ends: dict[OpenFile, int] = {}
    ours = []
    for index, piece in enumerate(pieces):
        end = ends.get(piece.file)
        if end is None:
            end = ends[piece.file] = _acquire(piece.file, fds)
        if piece.length and piece.offset + piece.length <= end:
            ours.append(index)
    return ours


def _acquire(file: OpenFile, fds: dict[OpenFile, int]) -> int:
    """Size of a file, which is then in `fds`; 0 of one that NIXL must not be given."""
    if not file.direct:
        return 0
    try:
        fds[file] = file.acquire()
        return os.fstat(fds[file]).st_size
    except OSError:
        return 0


def _spread(count: int, indices: Sequence[int], errors: Sequence[OSError | None]) -> list[OSError | None]:
    """One entry for each of `count` pieces: `errors` are those at `indices`."""
    spread: list[OSError | None] = [None] * count
    for index, error in zip(indices, errors, strict=True):
        spread[index] = error
    return spread
