"""The write side of the store: appends batches to segments and finishes segments. One thread uses it.

Orders that make any moment a good one to die:

    segment   reserved, header written; then batches
    batch     header and blocks in one write, with the next one beside it; its blocks enter the index when it and those
              before it have returned
    sync      of the file, then of its name; when there is nothing to write, and before the footer
    footer    written and synced; then the file is cut to end with it
              (beside the batches of the next segment: a power cut may find two segments without one)
    eviction  used blocks are written elsewhere and synced; the others leave the index; then the file is removed
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm_pd.kv_offload.block_io.aligned import AlignedMemory
from vllm_pd.kv_offload.block_io.base import BlockIO, OpenFile, Piece
from vllm_pd.kv_offload.segments import checksum, folder
from vllm_pd.kv_offload.segments.batch import Batch, pieces
from vllm_pd.kv_offload.segments.behind import Behind
from vllm_pd.kv_offload.segments.config import GIB, StoreConfig
from vllm_pd.kv_offload.segments.counters import Complaints, Counters
from vllm_pd.kv_offload.segments.files import OpenFiles
from vllm_pd.kv_offload.segments.flight import IN_FLIGHT, Ended, Flight
from vllm_pd.kv_offload.segments.format import (
    ALIGN,
    Identity,
    SegmentHeader,
    encode_footer,
    encode_header,
    footer_bytes,
)
from vllm_pd.kv_offload.segments.index import Index, Segment
from vllm_pd.kv_offload.segments.lock import FolderLock
from vllm_pd.kv_offload.segments.space import NoRoom, Space

_BUDGET_LOCK_S = 1.0
_EVICTIONS_FOR_A_BATCH = 8
_READS_S = 1.0
"""How long a batch waits for loads to be through with segments: far longer than they take on a disk that is well."""
_READS_POLL_S = 0.005


@dataclass(slots=True)
class _Open:
    """The segment that is being written.

    Attributes:
        file: open for writing; loads have their own.
        end: of the blocks that are in the index.
        next: where the next batch goes, behind those that are in flight.
        sequence: number of the next batch.
        blocks: in the index and in flight.
        key_bytes: of all their keys.
        unsynced: bytes written since the last sync.
        named: its name survives a power cut.
    """

    segment: Segment
    file: OpenFile
    end: int = ALIGN
    next: int = ALIGN
    sequence: int = 0
    blocks: int = 0
    key_bytes: int = 0
    unsynced: int = 0
    named: bool = False


class SegmentLog:
    """
    Args:
        config: sizes and places.
        io: moves the bytes.
        index: where blocks appear and disappear.
        files: open files that loads use.
        first_id: of the next segment; above all there are.
        free_bytes: as `Space`.

    Attributes:
        wake: called, in a thread of its own, when a batch that was begun is over: one for `land_those_over`.
    """

    def __init__(
        self,
        config: StoreConfig,
        io: BlockIO,
        index: Index,
        files: OpenFiles,
        counters: Counters,
        complaints: Complaints,
        first_id: int,
        free_bytes: Callable[[Path], int] = folder.free_bytes,
    ) -> None:
        self._config = config
        self._io = io
        self._index = index
        self._complaints = complaints
        self._next_id = first_id
        self._open: _Open | None = None
        self._flights: deque[tuple[_Open, Flight]] = deque()
        """All of one segment: the next is begun with nothing in flight."""
        self._flying = 0
        self.wake: Callable[[], None] = lambda: None
        self.took_room = False
        """A segment was begun, and room for the next one was not looked for since."""
        self._behind = Behind()
        self._page = AlignedMemory(ALIGN)
        self._space = Space(config, io, index, files, counters, complaints, self, free_bytes)

    @property
    def unsynced(self) -> int:
        """Bytes that a power cut would lose. For any thread."""
        log = self._open
        return self._flying + (log.unsynced if log else 0) + self._behind.at_work

    @property
    def in_flight(self) -> int:
        """Batches that were begun and whose end was not told."""
        return len(self._flights)

    def begin(self, batch: Batch, ended: Ended, *, may_evict: bool = True) -> None:
        """Begin to write a batch; waits for an earlier one if `IN_FLIGHT` are under way.

        Args:
            ended: told, in this thread and by a later call, when the blocks are in the index or with the error for
                which they are not. The segment was left for a new one then, and batches after it share its end.

        Raises:
            NoRoom, OSError: nothing was written, `ended` is not called.
        """
        self.land(IN_FLIGHT - 1)
        log = self._with_room(batch, may_evict)
        pieces = batch.pieces(log.file, log.next, log.segment.identity, log.sequence)
        flight = Flight(self._io, batch, pieces, log.next, ended, self.wake)
        self._flying += flight.bytes
        self._flights.append((log, flight))
        log.next += flight.bytes
        log.sequence += 1
        log.blocks += len(batch)
        log.key_bytes += batch.key_bytes

    def land(self, left: int = 0) -> None:
        """Wait for batches, oldest first, until `left` are in flight."""
        while len(self._flights) > left:
            log, flight = self._flights.popleft()
            error = flight.wait()
            if error is None:
                log.end += flight.bytes
                log.unsynced += flight.bytes
                self._flying -= flight.bytes
                self._index.add(log.segment, flight.batch.entries(flight.at), flight.batch.heat)
                flight.ended(None)
                continue
            lost = [flight, *(other for _, other in self._flights)]
            self._flights.clear()
            for other in lost:
                other.wait()
                self._flying -= other.bytes
            self._abandon(log)
            for other in lost:
                other.ended(error)

    def land_those_over(self) -> None:
        """As `land`, without waiting for one that is under way."""
        while self._flights and self._flights[0][1].over:
            self.land(len(self._flights) - 1)

    def sync(self) -> None:
        """What was written survives a power cut from now on.

        Raises:
            OSError: it may not. A segment that was being written was left for a new one; blocks are still checked at
                each load.
        """
        self.land()
        error = self._behind.wait()
        log = self._open
        if log is not None and log.unsynced:
            try:
                self._sync(log.file, log.named)
            except OSError:
                self._abandon(log)
                raise
            log.unsynced, log.named = 0, True
        if error is not None:
            raise error

    def finish(self) -> None:
        """Give the open segment its footer. Where that fails, the next start finds its blocks by their batches.

        Raises:
            OSError: an empty segment cannot be removed.
        """
        self.land()
        try:
            if self._open is not None:
                self._finish(self._open)
        finally:
            self._behind.wait()

    def seal(self, segment: Segment, file: OpenFile, end: int, *, named: bool = False) -> None:
        """Write a footer for all blocks of `segment` at `end`, and cut the file there. Closes `file`.

        Args:
            named: its name survives a power cut already.

        Raises:
            OSError: it has none.
        """
        try:
            self._sync(file, named)
            footer = encode_footer(segment.identity, segment.entries)
            memory = AlignedMemory(len(footer))
            memory.view[:] = footer
            self._write(pieces(file, end, memory.address, len(footer)))
            self._io.sync(file)
            folder.cut_file(segment.path, end + len(footer))
            self._index.resize(segment, end + len(footer))
        finally:
            # Only now: what is sealed may be evicted.
            segment.sealed = True
            file.close()

    def _sync(self, file: OpenFile, named: bool) -> None:
        """What is in it, and its name: then the blocks survive a power cut."""
        self._io.sync(file)
        if not named:
            folder.sync_folder(self._config.folder)

    def remove(self, path: Path) -> None:
        """A file that the index does not know any more; `make_room` tries again what does not go now.

        Raises:
            OSError: it is still there.
        """
        self._space.remove(path)

    def make_room(self, *, keep: bool = True) -> bool:
        """As `Space.make_room`."""
        self.took_room = False
        return self._space.make_room(keep=keep)

    def write_now(self, batch: Batch) -> None:
        """Blocks that are written again: they are in the index afterwards. Nothing is evicted for them.

        Raises:
            NoRoom, OSError: they are not.
        """
        ends: list[OSError | None] = []
        self.begin(batch, ends.append, may_evict=False)
        self.land()
        if ends[0] is not None:
            raise ends[0]

    def _with_room(self, batch: Batch, may_evict: bool) -> _Open:
        log = self._open
        if log is not None:
            footer = footer_bytes(log.blocks + len(batch), log.key_bytes + batch.key_bytes)
            if log.next + batch.disk_bytes + footer <= self._config.segment_bytes:
                return log
            # The footer names them all.
            self.land()
        # It may be gone: left because of an error.
        if (log := self._open) is not None:
            try:
                self._finish(log)
            except OSError as e:
                self._complaints.say("footer", f"{log.segment.path} could not be finished ({e}).")
        evictions, deadline = _EVICTIONS_FOR_A_BATCH if may_evict else 0, time.monotonic() + _READS_S
        while evictions and not self._space.has_room():
            if self.make_room(keep=False):
                evictions -= 1
            elif any(segment.pins for segment in self._index.segments()) and time.monotonic() < deadline:
                time.sleep(_READS_POLL_S)
            else:
                break
        self._open = self._begin()
        return self._open

    def _begin(self) -> _Open:
        """A new segment. Between looking for room and taking it, no other process does so."""
        config = self._config
        lock = FolderLock.take(config.root, _BUDGET_LOCK_S, folder.BUDGET_LOCK)
        if lock is None:
            raise NoRoom(f"another process does not let go of {config.root / folder.BUDGET_LOCK}")
        try:
            if not self._space.has_room():
                raise NoRoom(f"{config.root} has no room within {config.budget_bytes / GIB:.2f} GiB")
            identity = Identity(self._next_id, secrets.randbits(64))
            self._next_id += 1
            path = config.folder / folder.segment_name(identity.segment_id)
            file = self._io.open(path, create_bytes=config.segment_bytes)
        except OSError as e:
            if e.errno in folder.FULL:
                raise NoRoom(f"the disk of {config.root} is full") from e
            raise
        finally:
            lock.release()
        header = SegmentHeader(
            identity, config.namespace, config.block_bytes, config.segment_bytes, time.time(), checksum.KIND
        )
        try:
            self._page.view[:] = encode_header(header)
            self._write(pieces(file, 0, self._page.address, ALIGN))
        except OSError:
            file.close()
            with suppress(OSError):
                self.remove(path)
            raise
        self.took_room = True
        return _Open(self._index.open_segment(identity, path, config.segment_bytes), file)

    def _finish(self, log: _Open) -> None:
        """Nothing of it is in flight."""
        try:
            if log.segment.entries.keys:
                self._behind.begin(partial(self._seal, log), log.unsynced)
                return
        finally:
            # Only now: `unsynced` is asked by others meanwhile.
            self._open = None
        log.segment.sealed = True
        log.file.close()
        if self._index.drop(log.segment):
            self.remove(log.segment.path)

    def _seal(self, log: _Open) -> None:
        try:
            self.seal(log.segment, log.file, log.end, named=log.named)
        except OSError as e:
            self._complaints.say("footer", f"{log.segment.path} could not be finished ({e}).")
            # It may not have been synced either.
            raise

    def _abandon(self, log: _Open) -> None:
        """After an error: no more is written here, and what is whole is kept if the disk still takes a footer."""
        with suppress(OSError):
            self._finish(log)

    def _write(self, batch: list[Piece]) -> None:
        for error in self._io.write(batch):
            if error is not None:
                raise error
