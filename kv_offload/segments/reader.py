"""The threads that load: read into their own memory, compare checksums, copy to the targets, all in few calls each.

A thread that hangs in a read keeps its own memory and nothing else: its load ends by the deadline, and when the read
comes back it finds the load ended and throws the bytes away.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress

import numpy as np

from vllm_pd.kv_offload.block_io.aligned import AlignedMemory
from vllm_pd.kv_offload.block_io.base import BlockIO, OpenFile, Piece
from vllm_pd.kv_offload.segments import checksum
from vllm_pd.kv_offload.segments.config import StoreConfig
from vllm_pd.kv_offload.segments.counters import Complaints, Counters
from vllm_pd.kv_offload.segments.files import OpenFiles
from vllm_pd.kv_offload.segments.format import ALIGN
from vllm_pd.kv_offload.segments.index import Group, Index, Segment
from vllm_pd.kv_offload.segments.load import Load, LoadQueue, Part
from vllm_pd.kv_offload.segments.outcome import Reason
from vllm_pd.kv_offload.segments.results import Results

logger = logging.getLogger(f"vllm.{__name__}")

PART_BYTES = 4 << 20
"""Of a load, for one reader: a long load is read by several, each of which checks one part while others read."""

REQUEST_BYTES = 1 << 20
"""Neighbours are read at once up to this: few enough requests for us, and enough of them for a disk."""

_NOT_OPEN = OSError(errno.EIO, "its segment could not be opened")
_GONE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR)
"""Errors of opening a segment that all its blocks share."""


class Readers:
    """
    Args:
        config: sizes.
        io: moves the bytes.
        index: blocks that turn out bad leave it.
        files: open segments.
        results: hears of tickets that end.
        clock: seconds.
    """

    def __init__(
        self,
        config: StoreConfig,
        io: BlockIO,
        index: Index,
        files: OpenFiles,
        results: Results,
        counters: Counters,
        complaints: Complaints,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._io = io
        self._index = index
        self._files = files
        self._results = results
        self._counters = counters
        self._complaints = complaints
        self._clock = clock
        self._most = max(1, config.read_bytes // config.stride)
        self._part = max(1, min(config.read_bytes, PART_BYTES) // config.stride)
        self.queue = LoadQueue(config.readers, index, self._end, clock)
        self._threads = [
            threading.Thread(target=self._run, name=f"vllm_pd_ssd_read_{i}", daemon=True) for i in range(config.readers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, load: Load) -> None:
        """Never waits. A load without a stored block ends at once."""
        load.split(self._part)
        if not load.parts_left:
            load.ended = True
            self._end(load)
        elif not self.queue.add(load):
            load.ended = True
            for part in load.waiting:
                self._index.unpin(part.groups)
            load.fail(range(len(load.keys)), Reason.CLOSED)
            self._end(load)

    def close(self, timeout_s: float) -> bool:
        """End the threads. False if one still hangs."""
        self.queue.close()
        deadline = self._clock() + timeout_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        memory = AlignedMemory(self._most * self._config.stride)
        while parts := self.queue.take(self._most):
            try:
                self._read([part for part in parts if not part.load.ended], memory)
            except Exception:
                logger.exception("SSD tier: a load failed.")
                for part in parts:
                    self._fail(part, range(len(part)), Reason.READ_FAILED)
            finally:
                for part in parts:
                    self._index.unpin(part.groups)
                    self.queue.part_done(part.load)
            # Do not hold the last loads while waiting.
            del parts, part

    def _read(self, parts: list[Part], memory: AlignedMemory) -> None:
        """Parts of loads that are not ended, in one go: their blocks lie in `memory` in this order."""
        try:
            groups = [group for part in parts for group in part.groups]
            with ExitStack() as leases:
                files = self._open(leases, {segment for segment, _ in groups})
                errors = self._read_runs(_runs(groups, self._config.stride), files, memory)
        finally:
            self.queue.read_over()
        if error := next((error for error in errors.values() if error is not _NOT_OPEN), None):
            self._complaints.say("read", f"blocks cannot be read ({error}); they are computed again.")
        self._hand_over(parts, memory, errors)

    def _read_runs(self, runs: list[_Run], files: dict[Segment, OpenFile], memory: AlignedMemory) -> dict[int, OSError]:
        """Read blocks to their slots; those that could not be."""
        stride = self._config.stride

        def piece(run: _Run, at: int, count: int) -> Piece:
            begin = memory.address + (run.slot + at) * stride
            return Piece(files[run.segment], run.offset + at * stride, begin, count * stride)

        errors: dict[int, OSError] = {}
        for run in runs:
            if run.segment not in files:
                errors.update(dict.fromkeys(range(run.slot, run.slot + run.count), _NOT_OPEN))
        there = [run for run in runs if run.segment in files]
        for run, error in zip(there, self._io.read([piece(run, 0, run.count) for run in there]), strict=True):
            if error is not None:
                # One block is bad; its neighbours must not suffer from having been read with it.
                each = self._io.read([piece(run, at, 1) for at in range(run.count)]) if run.count > 1 else [error]
                errors.update((run.slot + at, error) for at, error in enumerate(each) if error is not None)
        return errors

    def _hand_over(self, parts: list[Part], memory: AlignedMemory, errors: dict[int, OSError]) -> None:
        """Deliver what was read; what was not, or is not what was stored, is no block any more."""
        whole = self._deliver(parts, memory, errors)
        for part, slots in _slots(parts):
            bad = [slot for slot in slots if not whole[slot]]
            if bad:
                unread = [slot - slots.start for slot in bad if slot in errors]
                corrupt = [slot - slots.start for slot in bad if slot not in errors and whole[slot] is not None]
                self._drop(part, unread, Reason.READ_FAILED)
                self._drop(part, corrupt, Reason.CORRUPT)

    def _open(self, leases: ExitStack, segments: set[Segment]) -> dict[Segment, OpenFile]:
        """Files of the segments that can be opened."""
        files = {}
        for segment in segments:
            try:
                files[segment] = leases.enter_context(self._files.lease(segment))
            except OSError as e:
                self._complaints.say("open", f"{segment.path} cannot be opened ({e}); its blocks are computed again.")
                if e.errno in _GONE:
                    self._index.empty(segment)
        return files

    def _deliver(self, parts: list[Part], memory: AlignedMemory, errors: dict[int, OSError]) -> list[bool | None]:
        """Copy to their targets those blocks that were read and are what was stored; which those are. Of the blocks of
        a load that ended meanwhile nothing is known.

        All in one pass: what Python does for each call it does with cold caches, after many megabytes went through.
        """
        keys = [key for part in parts for key in part.keys]
        sums = [
            checksum
            for part in parts
            for segment, numbers in part.groups
            for checksum in map(segment.entries.checksums.__getitem__, numbers)
        ]
        seeds, wanted = checksum.seeds(self._config.namespace, keys), np.array(sums, np.uint64)
        words, stride, size = np.frombuffer(memory.view, np.uint64), self._config.stride // 8, self._config.block_bytes
        targets = np.array([target for part in parts for target in part.targets], np.uint64)
        targets[list(errors)] = 0
        with ExitStack() as locks:
            # Always in one order: two readers may have parts of the same two loads.
            for load in sorted({part.load for part in parts}, key=id):
                locks.enter_context(load.lock)
            for part, slots in _slots(parts):
                if part.load.ended:
                    targets[slots.start : slots.stop] = 0
            whole: list[bool | None] = checksum.check_and_copy(words, 0, stride, seeds, wanted, targets, size).tolist()
            for part, slots in _slots(parts):
                if part.load.ended:
                    whole[slots.start : slots.stop] = [None] * len(part)
                part.load.delivered.update(compress(part.positions, whole[slots.start : slots.stop]))
        count = whole.count(True)
        self._counters.add(read_blocks_total=count, read_bytes_total=count * size)
        return whole

    def _drop(self, part: Part, bad: list[int], reason: Reason) -> None:
        """These of its blocks leave the index, and their keys fail."""
        if not bad:
            return
        places = [part.place(number) for number in bad]
        self._index.forget(places)
        if reason is Reason.CORRUPT:
            path = places[0][0].path
            self._complaints.say("corrupt", f"a block in {path} is not what was stored; it is computed again.")
        self._fail(part, bad, reason)

    def _fail(self, part: Part, numbers: Iterable[int], reason: Reason) -> None:
        with part.load.lock:
            if not part.load.ended:
                part.load.fail((part.positions[number] for number in numbers), reason)

    def _end(self, load: Load) -> None:
        result = load.result(self._config.block_bytes, self._clock())
        for reason in set(result.failed.values()):
            blocks = sum(1 for why in result.failed.values() if why is reason)
            self._counters.count(self._counters.loads_failed, reason, blocks)
        self._results.ended(result)


@dataclass(slots=True)
class _Run:
    """Blocks that are neighbours on the disk, and in memory from `slot` on."""

    segment: Segment
    offset: int
    slot: int
    count: int


def _slots(parts: Iterable[Part]) -> Iterator[tuple[Part, range]]:
    """Where in a reader's memory the blocks of each part are."""
    first = 0
    for part in parts:
        yield part, range(first, first + len(part))
        first += len(part)


def _runs(groups: Iterable[Group], stride: int) -> list[_Run]:
    """Each block of a group has the next slot of memory."""
    runs: list[_Run] = []
    slot, step, most = 0, stride // ALIGN, max(1, REQUEST_BYTES // stride)
    for segment, numbers in groups:
        begin = following = count = 0
        for offset in map(segment.entries.offsets.__getitem__, numbers):
            if offset != following or count == most:
                if count:
                    runs.append(_Run(segment, begin * ALIGN, slot, count))
                slot, begin, count = slot + count, offset, 0
            count += 1
            following = offset + step
        runs.append(_Run(segment, begin * ALIGN, slot, count))
        slot += count
    return runs
