"""The threads that load: read into their own memory, compare checksums, copy to the targets, all in few calls each.

A thread that hangs in a read keeps its own memory and nothing else: its load ends by the deadline, and when the read
comes back it finds the load ended and throws the bytes away.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from vllm_pd.kv_offload.block_io.aligned import AlignedMemory
from vllm_pd.kv_offload.block_io.base import BlockIO, OpenFile, Piece
from vllm_pd.kv_offload.segments import checksum
from vllm_pd.kv_offload.segments.config import StoreConfig
from vllm_pd.kv_offload.segments.counters import Complaints, Counters
from vllm_pd.kv_offload.segments.files import OpenFiles
from vllm_pd.kv_offload.segments.index import Index, Place, Segment
from vllm_pd.kv_offload.segments.load import Load, LoadQueue, Part
from vllm_pd.kv_offload.segments.outcome import Reason
from vllm_pd.kv_offload.segments.results import Results

logger = logging.getLogger(f"vllm.{__name__}")

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
        self.queue = LoadQueue(index, self._end, clock)
        self._threads = [
            threading.Thread(target=self._run, name=f"vllm_pd_ssd_read_{i}", daemon=True) for i in range(config.readers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, load: Load) -> None:
        """Never waits. A load without a stored block ends at once."""
        load.split(self._most)
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
        while (part := self.queue.take()) is not None:
            places = part.places()
            try:
                self._read(part, places, memory)
            except Exception:
                logger.exception("SSD tier: a load failed.")
                self._fail(part.load, part.numbers, Reason.READ_FAILED)
            finally:
                self._index.unpin(places)
                self.queue.part_done(part.load)
            # Do not hold the last targets while waiting.
            del part, places

    def _read(self, part: Part, places: list[Place], memory: AlignedMemory) -> None:
        load, stride = part.load, self._config.stride
        if load.ended:
            return
        with ExitStack() as leases:
            files = self._open(leases, {place[0] for place in places})
            slots = [i for i, (segment, _) in enumerate(places) if segment in files]
            errors = self._io.read(
                [
                    Piece(files[segment], segment.offset(number), memory.address + slot * stride, stride)
                    for slot, i in enumerate(slots)
                    for segment, number in (places[i],)
                ]
            )
        read = [(slot, i) for slot, i in enumerate(slots) if errors[slot] is None]
        if error := next((error for error in errors if error is not None), None):
            self._complaints.say("read", f"blocks cannot be read ({error}); they are computed again.")
        was_read = {i for _, i in read}
        self._drop(load, part, places, [i for i in range(len(places)) if i not in was_read], Reason.READ_FAILED)
        whole = self._deliver(load, part, places, memory, read)
        if whole is not None:
            self._drop(load, part, places, sorted(was_read - whole), Reason.CORRUPT)

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
        self, load: Load, part: Part, places: list[Place], memory: AlignedMemory, read: list[tuple[int, int]]
    ) -> set[int] | None:
        """Copy to their targets those blocks that were read and are what was stored; which they are.

        None if the load ended meanwhile, of whose blocks nothing is known then.
        """
        if not read:
            return set()
        keys, slots = part.load.keys, read[-1][0] + 1
        seeds, wanted, targets = (np.zeros(slots, np.uint64) for _ in range(3))
        good = [slot for slot, _ in read]
        seeds[good] = checksum.seeds(self._config.namespace, (keys[part.numbers[i]] for _, i in read))
        wanted[good] = [places[i][0].entries.checksums[places[i][1]] for _, i in read]
        words, stride, size = np.frombuffer(memory.view, np.uint64), self._config.stride // 8, self._config.block_bytes
        with load.lock:
            if load.ended:
                return None
            targets[good] = [_address(load.targets[part.numbers[i]]) for _, i in read]
            copied = checksum.check_and_copy(words, 0, stride, seeds, wanted, targets, size)
            whole = {i for slot, i in read if copied[slot]}
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


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
