"""At start: what earlier runs left enters the index, newest first; unfinished segments get their footer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_pd.kv_offload.block_io.aligned import AlignedMemory
from vllm_pd.kv_offload.block_io.base import BlockIO, OpenFile
from vllm_pd.kv_offload.segments import recovery
from vllm_pd.kv_offload.segments.batch import pieces
from vllm_pd.kv_offload.segments.config import MIB, StoreConfig
from vllm_pd.kv_offload.segments.counters import Complaints, Counters
from vllm_pd.kv_offload.segments.folder import SegmentFile
from vllm_pd.kv_offload.segments.format import FormatError, Identity, NothingWritten
from vllm_pd.kv_offload.segments.index import Index, Segment
from vllm_pd.kv_offload.segments.log import SegmentLog

logger = logging.getLogger(f"vllm.{__name__}")

_PORTION_BYTES = 8 * MIB


class Stopped(Exception):
    """The store is being closed while it still reads what is there."""


class Adoption:
    """Runs in the writer's thread, before it writes.

    Args:
        pause: called often, so that the engine gets its turn; may raise `Stopped` to end it early.
    """

    def __init__(
        self,
        config: StoreConfig,
        io: BlockIO,
        index: Index,
        log: SegmentLog,
        counters: Counters,
        complaints: Complaints,
        pause: Callable[[], None],
    ) -> None:
        self._config = config
        self._io = io
        self._index = index
        self._log = log
        self._counters = counters
        self._complaints = complaints
        self._pause = pause
        self._memory = AlignedMemory(_PORTION_BYTES)

    def run(self, files: tuple[SegmentFile, ...]) -> None:
        """
        Args:
            files: of this namespace, oldest first.
        """
        for file in reversed(files):
            try:
                self._adopt(file)
            except NothingWritten:
                self._remove(file)
            except FormatError as e:
                # The namespace is ours and so is its name; what cannot be read will never be, and takes room.
                self._counters.add(rejected_segments_total=1)
                self._complaints.say("reject", f"{file.path} {e}; removed.")
                self._remove(file)
            except Stopped:
                raise
            except Exception as e:
                # It may be readable next time, and takes its room until it is evicted, as the first.
                self._complaints.say("recover", f"{file.path} cannot be read ({e!r}); its blocks are computed again.")
                logger.debug("SSD tier: %s cannot be read.", file.path, exc_info=True)
                if all(segment.path != file.path for segment in self._index.segments()):
                    self._index.open_segment(Identity(file.id, 0), file.path, file.size).sealed = True
            self._pause()

    def _adopt(self, file: SegmentFile) -> None:
        handle = self._io.open(file.path)
        keep_open = False
        try:
            found = recovery.read_segment(self._reader(handle), file.size)
            header = found.header
            if header.identity.segment_id != file.id:
                raise FormatError(f"is segment {header.identity.segment_id} by its contents")
            if header.namespace != self._config.namespace:
                raise FormatError("belongs to another namespace")
            if header.block_bytes != self._config.block_bytes:
                raise FormatError(f"has blocks of {header.block_bytes} bytes")
            if not found.sealed:
                found = recovery.without_torn(self._reader(handle), found, _PORTION_BYTES)
            if not found.entries.keys:
                raise NothingWritten("holds no whole block")
            segment = self._index.open_segment(header.identity, file.path, file.size)
            segment.sealed = True
            fresh = self._index.adopt(segment, found.entries, self._pause)
            self._counters.add(recovered_blocks_total=fresh)
            if not found.sealed:
                keep_open = True
                self._finish(segment, handle, found.end)
        finally:
            if not keep_open:
                handle.close()

    def _finish(self, segment: Segment, handle: OpenFile, end: int) -> None:
        try:
            self._log.seal(segment, handle, end)
        except OSError as e:
            self._complaints.say("footer", f"{segment.path} could not be finished ({e}).")

    def _remove(self, file: SegmentFile) -> None:
        try:
            self._log.remove(file.path)
        except OSError as e:
            self._complaints.say("remove", f"{file.path} cannot be removed ({e}).")

    def _reader(self, handle: OpenFile) -> recovery.Read:
        def read(offset: int, length: int) -> memoryview:
            if length > len(self._memory.view):
                self._memory = AlignedMemory(length)
            for error in self._io.read(pieces(handle, offset, self._memory.address, length)):
                if error is not None:
                    raise error
            return self._memory.view[:length]

        return read
