"""The threads that load: read into their own memory, compare checksums, copy to the targets, all in few calls each.

A thread that hangs in a read keeps its own memory and nothing else: its load ends by the deadline, and when the read
comes back it finds the load ended and throws the bytes away.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from vllm_pd.kv_offload.block_io.aligned import AlignedMemory
from vllm_pd.kv_offload.block_io.base import BlockIO, OpenFile, Piece
from vllm_pd.kv_offload.segments import checksum
from vllm_pd.kv_offload.segments.config import StoreConfig
from vllm_pd.kv_offload.segments.counters import Complaints, Counters
from vllm_pd.kv_offload.segments.files import OpenFiles
from vllm_pd.kv_offload.segments.format import ALIGN
from vllm_pd.kv_offload.segments.index import Index, Place, Segment
from vllm_pd.kv_offload.segments.load import Load, LoadQueue, Part
from vllm_pd.kv_offload.segments.outcome import Reason
from vllm_pd.kv_offload.segments.results import Results

logger = logging.getLogger(f"vllm.{__name__}")

PART_BYTES = 4 << 20
"""Of a load, for one reader: a long load is read by several, each of which checks one part while others read."""

REQUEST_BYTES = 1 << 20
"""Neighbours are read at once up to this: few enough requests for us, and enough of them for a disk."""

TURN_S = 0.05
"""How long a reader waits for its turn to read; then others hang on the disk, and it may have another file."""

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
        self._turns = threading.Semaphore(max(1, config.readers // 2))
        self.queue = LoadQueue(index, self._end, clock)
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
                self._index.unpin(part.places())
            load.failed.update((key, Reason.CLOSED) for key in load.keys if key not in load.failed)
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
        while parts := self.queue.take(self._most, len(self._threads)):
            todo = [(part, part.places()) for part in parts]
            try:
                self._read(todo, memory)
            except Exception:
                logger.exception("SSD tier: a load failed.")
                for part in parts:
                    self._fail(part.load, part.numbers, Reason.READ_FAILED)
            finally:
                for part, places in todo:
                    self._index.unpin(places)
                    self.queue.part_done(part.load)
            # Do not hold the last targets while waiting.
            del parts, todo, part, places

    def _read(self, todo: list[tuple[Part, list[Place]]], memory: AlignedMemory) -> None:
        """Parts of loads that are not ended, in one go."""
        todo = [each for each in todo if not each[0].load.ended]
        everything = [place for _, places in todo for place in places]
        with ExitStack() as leases:
            files = self._open(leases, {segment for segment, _ in everything})
            with self._turn():
                errors = self._read_runs(_runs(everything, self._config.stride), files, memory)
        if error := next((error for error in errors.values() if error is not _NOT_OPEN), None):
            self._complaints.say("read", f"blocks cannot be read ({error}); they are computed again.")
        first = 0
        for part, places in todo:
            was_read = [i for i in range(len(places)) if first + i not in errors]
            self._hand_over(part, places, memory, first, was_read)
            first += len(places)

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

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Not all read at once: they would end at once too, and the disk would wait while all check what they read."""
        mine = self._turns.acquire(timeout=TURN_S)
        try:
            yield
        finally:
            if mine:
                self._turns.release()

    def _hand_over(
        self, part: Part, places: list[Place], memory: AlignedMemory, first: int, was_read: list[int]
    ) -> None:
        """One part, whose blocks lie from slot `first` on."""
        if len(was_read) < len(places):
            missing = set(range(len(places))).difference(was_read)
            self._drop(part.load, part, places, sorted(missing), Reason.READ_FAILED)
        whole = self._deliver(part.load, part, places, memory, first, was_read)
        if whole is not None and len(whole) < len(was_read):
            self._drop(part.load, part, places, sorted(set(was_read) - whole), Reason.CORRUPT)

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

    def _deliver(
        self, load: Load, part: Part, places: list[Place], memory: AlignedMemory, first: int, was_read: list[int]
    ) -> set[int] | None:
        """Copy to their targets those blocks that were read and are what was stored; which they are.

        None if the load ended meanwhile, of whose blocks nothing is known then.
        """
        if not was_read:
            return set()
        keys = part.load.keys
        seeds, wanted, targets = (np.zeros(len(places), np.uint64) for _ in range(3))
        seeds[was_read] = checksum.seeds(self._config.namespace, (keys[part.numbers[i]] for i in was_read))
        wanted[was_read] = [places[i][0].entries.checksums[places[i][1]] for i in was_read]
        words, stride, size = np.frombuffer(memory.view, np.uint64), self._config.stride // 8, self._config.block_bytes
        with load.lock:
            if load.ended:
                return None
            targets[was_read] = [_address(load.targets[part.numbers[i]]) for i in was_read]
            copied = checksum.check_and_copy(words, first * stride, stride, seeds, wanted, targets, size)
            whole = set(np.flatnonzero(copied).tolist())
            load.delivered.update(part.numbers[i] for i in whole)
        self._counters.add(read_blocks_total=len(whole), read_bytes_total=len(whole) * size)
        return whole

    def _drop(self, load: Load, part: Part, places: list[Place], bad: list[int], reason: Reason) -> None:
        """These blocks leave the index, and their keys fail."""
        if not bad:
            return
        self._index.forget([places[i] for i in bad])
        if reason is Reason.CORRUPT:
            path = places[bad[0]][0].path
            self._complaints.say("corrupt", f"a block in {path} is not what was stored; it is computed again.")
        self._fail(load, [part.numbers[i] for i in bad], reason)

    def _fail(self, load: Load, numbers: list[int], reason: Reason) -> None:
        with load.lock:
            if not load.ended:
                load.failed.update((load.keys[n], reason) for n in numbers if n not in load.delivered)

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


def _runs(places: Sequence[Place], stride: int) -> list[_Run]:
    """Each place has the next slot of memory."""
    runs: list[_Run] = []
    last: Segment | None = None
    following, step, most = -1, stride // ALIGN, max(1, REQUEST_BYTES // stride)
    for slot, (segment, number) in enumerate(places):
        at = segment.entries.offsets[number]
        if segment is last and at == following and runs[-1].count < most:
            runs[-1].count += 1
        else:
            runs.append(_Run(segment, at * ALIGN, slot, 1))
            last = segment
        following = at + step
    return runs


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
