"""Which blocks are worth a write to the SSD. Pure.

Most prompts never come again: of the blocks in a public chat trace three in four are seen once. Writing all of them
wears the drive and drives out what is used; writing only what was seen before loses every second turn of a
conversation. So blocks that were seen in an earlier request are always written, and those seen for the first time as
long as the writes of a day stay within an allowance: so many times the tier's size, all of it at once while the tier is
being filled. A large tier under little load then keeps everything, a small or busy one what is known to come again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

DAY_S = 86400.0

_ROWS = 4
_MOST = 255
_SMALLEST_WIDTH, _LARGEST_WIDTH = 1 << 12, 1 << 22
_MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64
)
_HALF = bytes(n >> 1 for n in range(256))


class Sightings:
    """How many requests had a block, approximately and never too few: a count-min sketch that forgets by halving.

    Takes 4 bytes for each of `blocks`, between 16 KiB and 16 MiB, whatever is counted.

    Args:
        blocks: how many are to be told apart; counts are halved each time that this many were added.
    """

    def __init__(self, blocks: int) -> None:
        width = min(_LARGEST_WIDTH, max(_SMALLEST_WIDTH, blocks))
        bits = (width - 1).bit_length()
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros((_ROWS, 1 << bits), dtype=np.uint8)
        self._rows = np.arange(_ROWS)[:, None]
        self._until_halving = self._sample = 1 << bits

    def count(self, keys: Sequence[bytes]) -> NDArray[np.uint8]:
        """Requests that had each key, at most 255."""
        least: NDArray[np.uint8] = self._table[self._rows, self._places(keys)].min(axis=0)
        return least

    def add(self, keys: Sequence[bytes]) -> NDArray[np.uint8]:
        """A request had these. They are different from one another. Returns the counts before."""
        places = self._places(keys)
        least: NDArray[np.uint8] = self._table[self._rows, places].min(axis=0)
        # Only the smallest of a key's counters can be right, so only those grow: fewer are counted too high.
        grown = np.minimum(least, _MOST - 1) + np.uint8(1)
        for row in range(_ROWS):
            np.maximum.at(self._table[row], places[row], grown)
        self._until_halving -= len(keys)
        if self._until_halving <= 0:
            self._until_halving = self._sample
            halved = self._table.tobytes().translate(_HALF)
            self._table = np.frombuffer(bytearray(halved), dtype=np.uint8).reshape(self._table.shape)
        return least

    def _places(self, keys: Sequence[bytes]) -> NDArray[np.intp]:
        """(row, key): the counter of each key in each row."""
        hashes = np.fromiter(map(hash, keys), dtype=np.int64, count=len(keys)).astype(np.uint64)
        return ((hashes[None, :] * _MULTIPLIERS[:, None]) >> self._shift).astype(np.intp)


@dataclass(frozen=True, slots=True)
class Allowance:
    """A token bucket of bytes. Times are the caller's monotonic seconds.

    Attributes:
        size: the most that can be saved up.
        rate: bytes per second that come in.
        left: bytes at time `at`; below 0 after writes that were not asked for.
    """

    size: float
    rate: float
    left: float
    at: float

    def spent(self, amount: float, now: float) -> Allowance:
        """`amount` bytes were written."""
        return replace(self, left=self.at_time(now) - amount, at=max(now, self.at))

    def at_time(self, now: float) -> float:
        """Bytes that are left."""
        return min(self.size, self.left + self.rate * max(0.0, now - self.at))


class Admission:
    """Decides for each block that is offered. Used by one thread.

    Args:
        block_bytes: what a block takes on the disk.
        budget_bytes: size of the tier.
        writes_per_day: how many times its size the tier may be written in a day before blocks seen for the first time
            are left out; 0 leaves them out always, infinity never.
        now: monotonic seconds.
        stored_bytes: what the tier holds already; the rest may be filled at once.
    """

    def __init__(
        self, block_bytes: int, budget_bytes: int, writes_per_day: float, now: float, stored_bytes: int = 0
    ) -> None:
        self._block_bytes = block_bytes
        # Reuse is looked for beyond what the tier holds: four times as many blocks may pass between two sightings.
        self._sightings = Sightings(4 * budget_bytes // block_bytes)
        self._unlimited = writes_per_day == float("inf")
        size = float(budget_bytes) if writes_per_day else 0.0
        rate = 0.0 if self._unlimited else budget_bytes * writes_per_day / DAY_S
        self._allowance = Allowance(size, rate, max(0.0, size - stored_bytes), now)

    def choose(self, keys: Sequence[bytes], first_too: bool, now: float) -> NDArray[np.bool_]:
        """Which of the offered blocks to write; these then count as written.

        Args:
            first_too: False leaves out what is seen for the first time whatever the allowance: of a request of which
                such blocks were left out before, since a block is of no use without those before it.
        """
        chosen = self._sightings.count(keys) > 0
        if first_too and (self._unlimited or self._allowance.at_time(now) > 0):
            chosen[:] = True
        self.written(int(chosen.sum()), now)
        return chosen

    def written(self, blocks: int, now: float) -> None:
        """So many blocks are written, by `choose` or otherwise."""
        if blocks and not self._unlimited:
            self._allowance = self._allowance.spent(blocks * self._block_bytes, now)

    def seen(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """A request had these blocks. Returns which of them an earlier one had, too."""
        return self._sightings.add(keys) > 0
