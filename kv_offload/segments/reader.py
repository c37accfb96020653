"""The threads that load: read into their own memory, compare checksums, copy to the targets, all in few calls each.

Where blocks are neighbours, as those of one prompt are, one call does all three (`_stream`). Many small requests are
read by `BlockIO` first, which has them in flight at once.

A thread that hangs in a read keeps its own memory and nothing else: its load ends by the deadline, and when the read
comes back it finds the load ended and throws the bytes away.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from vllm_pd.kv_offload.block_io.aligned import AlignedMemory
from vllm_pd.kv_offload.block_io.base import BlockIO, OpenFile, Piece
from vllm_pd.kv_offload.block_io.merge import LONG_BYTES
from vllm_pd.kv_offload.segments.block_pass import REQUEST_BYTES, Runs
from vllm_pd.kv_offload.segments.config import StoreConfig
from vllm_pd.kv_offload.segments.counters import Complaints, Counters
from vllm_pd.kv_offload.segments.delivery import Delivery
from vllm_pd.kv_offload.segments.files import OpenFiles
from vllm_pd.kv_offload.segments.format import ALIGN
from vllm_pd.kv_offload.segments.index import Group, Index, Segment
from vllm_pd.kv_offload.segments.load import Load, LoadQueue, Part
from vllm_pd.kv_offload.segments.outcome import Reason
from vllm_pd.kv_offload.segments.results import Results

logger = logging.getLogger(f"vllm.{__name__}")

PART_BYTES = 4 << 20
"""Of a load, for one reader: a long load is read by several, each of which checks one part while others read."""

_NO_FILE = -2
"""In place of a descriptor: what cannot be opened, which is not read."""
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
        memory.touch()
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
        """Parts of loads that are not ended, in one go."""
        stride = self._config.stride
        delivery = Delivery(parts, self._config.namespace, stride, self._config.block_bytes)
        with ExitStack() as turn:
            turn.callback(self.queue.read_over)
            groups = [group for part in parts for group in part.groups]
            with ExitStack() as leases:
                files = self._open(leases, {segment for segment, _ in groups})
                left = _runs(groups, stride)
                if self._io.pread and len(delivery) * stride >= LONG_BYTES * len(left):
                    turn.close()
                    left = self._stream(left, files, delivery, memory)
                errors = self._read_runs(left, files, memory)
        if error := next((error for error in errors.values() if error is not _NOT_OPEN), None):
            self._complaints.say("read", f"blocks cannot be read ({error}); they are computed again.")
        if left:
            delivery.copy(memory.address, [slot for run in left for slot in run.slots if slot not in errors])
        self._hand_over(delivery)

    def _stream(
        self, runs: list[_Run], files: dict[Segment, OpenFile], delivery: Delivery, memory: AlignedMemory
    ) -> list[_Run]:
        """Read and deliver all of it in one call, each run while it is in the processor's cache, and not once asking
        for Python's lock, which the engine next door holds most of the time.

        Returns:
            Runs with a block that was not read: why is for `BlockIO.read` to say.
        """
        with ExitStack() as uses:
            fds = {segment: fd for segment, file in files.items() if (fd := _in_use(uses, file)) is not None}
            delivery.read_and_copy(
                Runs(
                    np.array([fds.get(run.segment, _NO_FILE) for run in runs], np.int32),
                    np.array([run.offset for run in runs], np.int64),
                    np.array([run.count for run in runs], np.int64),
                ),
                self._io.pread,
                memory.address,
            )
        return [run for run in runs if delivery.unread(run.slots)]

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

    def _hand_over(self, delivery: Delivery) -> None:
        """Deliver what was read; what was not, or is not what was stored, is no block any more."""
        delivered, lost = delivery.end()
        self._counters.add(read_blocks_total=delivered, read_bytes_total=delivered * self._config.block_bytes)
        for part, reasons in lost.items():
            for reason, numbers in reasons.items():
                self._drop(part, numbers, reason)

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

    @property
    def slots(self) -> range:
        return range(self.slot, self.slot + self.count)


def _in_use(uses: ExitStack, file: OpenFile) -> int | None:
    """Its descriptor, which stays valid until `uses` ends; None if it was closed."""
    try:
        fd = file.acquire()
    except OSError:
        return None
    uses.callback(file.release)
    return fd


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
