"""What one reader hands over at once: blocks of several loads, as machine code takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_pd.kv_offload.segments import block_pass, checksum
from vllm_pd.kv_offload.segments.block_pass import Runs, Words
from vllm_pd.kv_offload.segments.load import Part
from vllm_pd.kv_offload.segments.outcome import Reason


class Delivery:
    """Blocks in slots, numbered in the order of the parts.

    A block is copied to its target and found right or wrong in one pass: the target of a wrong one may hold anything
    afterwards. Targets of loads that end meanwhile are left alone.

    Args:
        stride: padded size of a block.
        size: bytes of it that are copied.
    """

    def __init__(self, parts: Sequence[Part], namespace: bytes, stride: int, size: int) -> None:
        self.parts = parts
        self._stride = stride
        self._size = size
        keys = [key for part in parts for key in part.keys]
        sums = [
            checksum
            for part in parts
            for segment, numbers in part.groups
            for checksum in map(segment.entries.checksums.__getitem__, numbers)
        ]
        self._seeds, self._wanted = checksum.seeds(namespace, keys), np.array(sums, np.uint64)
        self._targets = np.array([target for part in parts for target in part.targets], np.uint64)
        self._gates = np.repeat(
            np.array([part.load.gate.address for part in parts], np.uint64), [len(part) for part in parts]
        )
        self._states: NDArray[np.int8] = np.full(len(keys), block_pass.UNREAD, np.int8)
        self._right: NDArray[np.bool_] = np.zeros(len(keys), np.bool_)

    def __len__(self) -> int:
        return len(self._seeds)

    def slots(self) -> Iterator[tuple[Part, range]]:
        """Of each part."""
        first = 0
        for part in self.parts:
            yield part, range(first, first + len(part))
            first += len(part)

    def read_and_copy(self, runs: Runs, pread: int, buffer: int) -> None:
        """All blocks, a run at a time, each read to the same place.

        Args:
            pread: address of what reads (`BlockIO.pread`).
            buffer: address of room for the longest run.
        """
        begins = np.repeat(np.cumsum(runs.counts) - runs.counts, runs.counts)
        places = np.arange(len(self)) - begins
        self._pass(np.uint64(buffer) + places.astype(np.uint64) * np.uint64(self._stride), runs, pread)

    def copy(self, memory: int, slots: Sequence[int]) -> None:
        """Blocks that were read, slot by slot, to memory that begins at an address."""
        sources = np.zeros(len(self), np.uint64)
        sources[slots] = checksum.addresses(memory, self._stride, len(self))[slots]
        self._pass(sources, None, 0)

    def unread(self, slots: range) -> bool:
        """Whether one of these blocks was not read."""
        return not self._states[slots.start : slots.stop].all()

    def end(self) -> tuple[int, dict[Part, dict[Reason, list[int]]]]:
        """Tell the loads what they have got.

        Returns:
            How many blocks were delivered, and the blocks of each part, by their numbers there, that are no blocks any
            more.
        """
        delivered = 0
        lost: dict[Part, dict[Reason, list[int]]] = {}
        for part, slots in self.slots():
            states, right = self._states[slots.start : slots.stop], self._right[slots.start : slots.stop]
            refused = np.flatnonzero(states == block_pass.REFUSED)
            with part.load.lock:
                if not part.load.ended:
                    positions = [part.positions[number] for number in np.flatnonzero(right)]
                    part.load.delivered.update(positions)
                    delivered += len(positions)
                    # Its gate is closed already, and whoever ends it comes again; or this was its last part.
                    part.load.fail((part.positions[number] for number in refused), Reason.LATE)
            unread = np.flatnonzero(states == block_pass.UNREAD).tolist()
            corrupt = np.flatnonzero((states == block_pass.DONE) & ~right).tolist()
            if unread or corrupt:
                lost[part] = {Reason.READ_FAILED: unread, Reason.CORRUPT: corrupt}
        return delivered, lost

    def _pass(self, sources: Words, runs: Runs | None, pread: int) -> None:
        sums, states = block_pass.run(
            sources,
            self._targets,
            self._stride,
            self._size,
            self._seeds,
            padded_sources=True,
            gates=self._gates,
            runs=runs,
            pread=pread,
        )
        now = states != block_pass.UNREAD
        self._states[now] = states[now]
        self._right |= (sums == self._wanted) & (states == block_pass.DONE)
