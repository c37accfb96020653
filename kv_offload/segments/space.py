"""Room for segments: what all files may take, and whose go. Used blocks of a segment that goes are written again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from vllm_pd.kv_offload.block_io.aligned import AlignedMemory
from vllm_pd.kv_offload.block_io.base import BlockIO, Piece
from vllm_pd.kv_offload.segments import folder, reclaim
from vllm_pd.kv_offload.segments.batch import Batch
from vllm_pd.kv_offload.segments.config import StoreConfig
from vllm_pd.kv_offload.segments.counters import Complaints, Counters
from vllm_pd.kv_offload.segments.files import OpenFiles
from vllm_pd.kv_offload.segments.index import Index, Segment
from vllm_pd.kv_offload.segments.lock import holder
from vllm_pd.kv_offload.segments.outcome import Reason


class NoRoom(Exception):
    """There is no place for a new segment, and nothing may be evicted now. The message is a sentence's beginning."""


class Log(Protocol):
    """Where used blocks go."""

    def write_now(self, batch: Batch) -> None: ...

    def sync(self) -> None: ...


class Space:
    """For the thread that writes.

    Args:
        config: sizes and places.
        io: reads what is kept.
        index: where blocks disappear.
        files: open files that loads use.
        log: what is kept is written there.
        free_bytes: of a file system; replaced by tests.
    """

    def __init__(
        self,
        config: StoreConfig,
        io: BlockIO,
        index: Index,
        files: OpenFiles,
        counters: Counters,
        complaints: Complaints,
        log: Log,
        free_bytes: Callable[[Path], int] = folder.free_bytes,
    ) -> None:
        self._config = config
        self._io = io
        self._index = index
        self._files = files
        self._counters = counters
        self._complaints = complaints
        self._log = log
        self._free_bytes = free_bytes
        self._limits = reclaim.Limits(config.budget_bytes, config.floor_bytes)
        self._undeleted: list[Path] = []
        self._memory = AlignedMemory(Batch.bytes_for(config.batch_blocks, config.stride))

    def has_room(self) -> bool:
        """Whether there is room for a segment.

        Raises:
            OSError: files cannot be looked at.
        """
        root = self._config.root
        used = sum(usage.bytes for usage in folder.usages(root))
        return not reclaim.missing(self._limits, used, self._free_bytes(root), self._config.segment_bytes)

    def remove(self, path: Path) -> None:
        """A file that the index does not know any more; `make_room` tries again what does not go now.

        Raises:
            OSError: it is still there.
        """
        self._undeleted.append(path)
        folder.remove_file(path)
        self._undeleted.pop()

    def make_room(self, *, keep: bool = True) -> bool:
        """Evict one segment if there is no room for a new one besides that which is being written.

        Args:
            keep: write its used blocks again.

        Returns:
            Whether one was removed, so that it is worth asking again.

        Raises:
            OSError: files cannot be looked at or removed.
        """
        while self._undeleted:
            folder.remove_file(self._undeleted[-1])
            self._undeleted.pop()
        root, wanted = self._config.root, self._config.segment_bytes
        usages, free = folder.usages(root), self._free_bytes(root)
        used = sum(usage.bytes for usage in usages)
        if not reclaim.missing(self._limits, used, free, wanted):
            return False
        if folder.remove_oldest_foreign(root, self._config.folder):
            self._counters.add(foreign_segments_total=1)
            return True
        others = [usage for usage in usages if usage.path != self._config.folder and holder(usage.path) is not None]
        own = self._index.used_bytes
        if not reclaim.is_ours_to_free(self._limits, used, free, wanted, own, len(others)):
            return False
        return self._evict(keep)

    def _evict(self, keep: bool) -> bool:
        segments = {s.id: s for s in self._index.segments() if s.sealed and not s.pins}
        candidates = (reclaim.Candidate(s.id, len(s.heat), s.live, s.hot, s.used_at) for s in segments.values())
        chosen = reclaim.victim(candidates, self._index.clock, self._config.budget_bytes // self._config.segment_bytes)
        if chosen is None:
            return False
        segment = segments[chosen.id]
        if keep and segment.hot:
            self._rewrite(segment)
        left = self._index.empty(segment)
        self._counters.add(evicted_blocks_total=left)
        if not self._index.drop(segment):
            # A load began meanwhile. Without blocks it is the first choice next time.
            return False
        self._files.close(segment)
        self.remove(segment.path)
        self._counters.add(evicted_segments_total=1)
        return True

    def _rewrite(self, segment: Segment) -> None:
        """Its used blocks, as many as write amplification allows, are written again; errors cost only those blocks."""
        config = self._config
        most = int(segment.size * config.rewrite_share) // config.stride
        numbers = reclaim.keep(segment.heat, self._index.live_blocks(segment), most)
        try:
            for first in range(0, len(numbers), config.batch_blocks):
                batch = self._read_again(segment, numbers[first : first + config.batch_blocks])
                if len(batch):
                    self._log.write_now(batch)
                    self._counters.add(rewritten_blocks_total=len(batch), written_bytes_total=batch.disk_bytes)
            # Only now may the old ones go.
            self._log.sync()
        except NoRoom:
            return
        except OSError as e:
            self._complaints.say("rewrite", f"used blocks of {segment.path} could not be kept ({e}).")

    def _read_again(self, segment: Segment, numbers: list[int]) -> Batch:
        config, entries = self._config, segment.entries
        batch = Batch(self._memory.view, config.batch_blocks, config.stride)
        with self._files.lease(segment) as file:
            errors = self._io.read(
                [
                    Piece(file, segment.offset(number), batch.block_address(i), config.stride)
                    for i, number in enumerate(numbers)
                ]
            )
        good = batch.refill(
            config.namespace,
            [entries.keys[number] for number in numbers],
            [entries.checksums[number] for number in numbers],
            [error is None for error in errors],
        )
        batch.heat = bytes(segment.heat[numbers[i]] // 2 for i in good)
        self._counters.count(self._counters.puts_lost, Reason.CORRUPT, len(numbers) - len(good))
        return batch
