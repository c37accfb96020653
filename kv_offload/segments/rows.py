"""The caller's side of a transfer: rows of one memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """Blocks in memory that is cut into blocks of equal size, as the CPU tier is: which rows, in the order of the keys.

    Numbers rather than a view of each block: a view and its address take longer than a small block's whole way.

    Attributes:
        memory: writable and contiguous, its first byte that of row 0.
        numbers: of the rows.
    """

    memory: memoryview
    numbers: Sequence[int]

    def addresses(self, block_bytes: int) -> list[int]:
        """Where each block begins, as long as `memory` is referred to.

        Raises:
            ValueError: the memory cannot be written to, is not contiguous, or has no such row.
        """
        memory = self.memory
        if memory.readonly or not memory.c_contiguous:
            raise ValueError("blocks must be in writable contiguous memory")
        numbers = self.numbers
        if not len(numbers):
            return []
        rows = memory.nbytes // block_bytes
        if min(numbers) < 0 or max(numbers) >= rows:
            raise ValueError(f"there is no row {min(numbers)} or {max(numbers)} in {rows} of {block_bytes} bytes")
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return [base + number * block_bytes for number in numbers]
