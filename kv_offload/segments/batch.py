"""A batch in memory, laid out as it is written: header, then blocks.

|  room for the header  | block 0 | block 1 | ...
          |  header      |
                         ^ the header ends where the blocks begin, so that what is written is contiguous
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from vllm_pd.kv_offload.block_io.base import OpenFile, Piece
from vllm_pd.kv_offload.segments import checksum
from vllm_pd.kv_offload.segments.format import (
    ALIGN,
    MAX_KEY_BYTES,
    Entries,
    Identity,
    batch_header_bytes,
    encode_batch,
)

PIECE_BYTES = 4 << 20
"""A longer range is several pieces, so that a backend may have more than one in flight."""


class Batch:
    """Blocks on their way to a segment.

    Args:
        view: memory of `Batch.bytes_for` bytes, aligned.
        most: blocks that have room.
        stride: padded size of a block.
        release: called once, when nothing touches `view` any more.
    """

    def __init__(self, view: memoryview, most: int, stride: int, release: Callable[[], None] = lambda: None) -> None:
        self.most = most
        self.stride = stride
        self.keys: list[bytes] = []
        self.checksums: array[int] = array("Q")
        self.heat: bytes | None = None
        self._view = view
        self._address: int = np.frombuffer(view, np.uint8).ctypes.data
        self._first = batch_header_bytes(most, most * MAX_KEY_BYTES)
        self._release = release

    @staticmethod
    def bytes_for(most: int, stride: int) -> int:
        return batch_header_bytes(most, most * MAX_KEY_BYTES) + most * stride

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def room(self) -> int:
        """Blocks that may still be added."""
        return self.most - len(self.keys)

    @property
    def disk_bytes(self) -> int:
        """What it takes in a segment."""
        return batch_header_bytes(len(self.keys), self.key_bytes) + len(self.keys) * self.stride

    @property
    def key_bytes(self) -> int:
        return sum(map(len, self.keys))

    def add(self, namespace: bytes, keys: Sequence[bytes], sources: Sequence[int], size: int) -> None:
        """Copy blocks in and take their checksums.

        Args:
            sources: address of each; at most `room`.
            size: bytes of each; the rest of the stride stays as it is: zero, in memory that is only used for this.
        """
        sums = checksum.copy_and_sum(
            self.block_address(len(self.keys)),
            self.stride,
            np.array(sources, np.uint64),
            size,
            checksum.seeds(namespace, keys),
        )
        self.keys.extend(keys)
        self.checksums.frombytes(sums.tobytes())

    def refill(
        self, namespace: bytes, keys: Sequence[bytes], checksums: Sequence[int], whole: Sequence[bool]
    ) -> list[int]:
        """Take over blocks that were read to `block_address(0)`, ... without those that are not whole or not intact.

        Returns:
            Indices of those that are.
        """
        found = checksum.sums(self.block_address(0), self.stride, checksum.seeds(namespace, keys)).tolist()
        good = [i for i in range(len(keys)) if whole[i] and found[i] == checksums[i]]
        for to, i in enumerate(good):
            if to != i:
                ctypes.memmove(self.block_address(to), self.block_address(i), self.stride)
        self.keys = [keys[i] for i in good]
        self.checksums = array("Q", [checksums[i] for i in good])
        return good

    def block_address(self, number: int) -> int:
        return self._address + self._first + number * self.stride

    def pieces(self, file: OpenFile, offset: int, identity: Identity, sequence: int) -> list[Piece]:
        """What to write, with the header put before the blocks.

        Args:
            offset: where in `file` the batch begins.
        """
        header = encode_batch(identity, sequence, self.keys, self.checksums)
        start = self._first - len(header)
        self._view[start : self._first] = header
        return pieces(file, offset, self._address + start, len(header) + len(self.keys) * self.stride)

    def entries(self, offset: int) -> Entries:
        """Its blocks, when the batch begins at `offset` of the file."""
        first = (offset + batch_header_bytes(len(self.keys), self.key_bytes)) // ALIGN
        step = self.stride // ALIGN
        return Entries(self.keys, array("I", range(first, first + len(self.keys) * step, step)), self.checksums)

    def release(self) -> None:
        self._release()


def pieces(file: OpenFile, offset: int, address: int, length: int) -> list[Piece]:
    """A range as pieces of `PIECE_BYTES`."""
    return [
        Piece(file, offset + at, address + at, min(PIECE_BYTES, length - at)) for at in range(0, length, PIECE_BYTES)
    ]
