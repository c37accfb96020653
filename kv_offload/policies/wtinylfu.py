"""W-TinyLFU (Einziger, Friedman, Manes, "TinyLFU: a highly efficient cache admission policy", ACM TOS 2017)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm_pd.kv_offload.policies.base import Key, Queue, QueuePolicy

WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8
"""Of the capacity: a window for new blocks; of the rest, the part for those used again. As in Caffeine."""
SAMPLE = 10
"""So many uses per block of capacity, then all counts are halved."""
_MAX = 15


class FrequencySketch:
    """Count-min sketch of 4 rows: how often a key was seen lately, never too low, at most 15."""

    def __init__(self, capacity: int) -> None:
        # Four counters a block in each row: with fewer, blocks seen once look frequent for what shares their counters.
        self._mask = (1 << max(6, (4 * capacity - 1).bit_length())) - 1
        self._rows = [bytearray(self._mask + 1) for _ in range(4)]
        self._limit = SAMPLE * capacity
        self._seen = 0

    def add(self, key: Key) -> None:
        places = self._places(key)
        low = min(row[place] for row, place in zip(self._rows, places, strict=True))
        if low < _MAX:
            for row, place in zip(self._rows, places, strict=True):
                if row[place] == low:
                    row[place] += 1
        self._seen += 1
        if self._seen >= self._limit:
            self._rows = [row.translate(_HALVED) for row in self._rows]
            self._seen //= 2

    def count(self, key: Key) -> int:
        return min(row[place] for row, place in zip(self._rows, self._places(key), strict=True))

    def clear(self) -> None:
        self._rows = [bytearray(len(row)) for row in self._rows]
        self._seen = 0

    def _places(self, key: Key) -> tuple[int, int, int, int]:
        # Keys are digests: any bytes of them are as good as a hash. Short keys repeat theirs.
        seed = int.from_bytes((key[:16] * 16)[:16])
        mask = self._mask
        return seed & mask, seed >> 32 & mask, seed >> 64 & mask, seed >> 96 & mask


_HALVED = bytes(value >> 1 for value in range(256))


class WTinyLfu(QueuePolicy):
    """A small window for new blocks before a segmented LRU; of the oldest of both, the one seen less often goes."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._window_size = max(1, int(capacity * WINDOW_SHARE))
        self._protected_size = int((capacity - self._window_size) * PROTECTED_SHARE)
        self._window = Queue(self._pinned)
        self._probation = Queue(self._pinned)
        self._kept = Queue(self._pinned)
        self._sketch = FrequencySketch(capacity)

    def missed(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._sketch.add(key)

    def accessed(self, chain: Sequence[Key], reused: Collection[Key], loaded: Collection[Key] = ()) -> None:
        for key in reversed(chain):
            home = self._home.get(key)
            if home is None:
                continue
            if key in reused:
                self._sketch.add(key)
                # Also from the window: room is made before a prompt is stored, so the window is drained late.
                home = self._kept
            self._place(key, home)
        while len(self._kept) > self._protected_size:
            old = self._kept.oldest()
            if old is None:
                break
            self._place(old, self._probation)

    def clear(self) -> None:
        super().clear()
        self._sketch.clear()

    def _queues(self) -> Collection[Queue]:
        return self._window, self._probation, self._kept

    def _queue_of_new(self, key: Key) -> Queue:
        return self._window

    def _victim(self) -> Key:
        while len(self._window) > self._window_size:
            new = self._window.oldest()
            if new is None:
                break
            if len(self._probation) + len(self._kept) < self.capacity - self._window_size:
                self._place(new, self._probation)
                continue
            old = self._probation.oldest()
            if old is None:
                old = self._kept.oldest()
            if old is None or self._sketch.count(new) <= self._sketch.count(old):
                return new
            self._place(new, self._probation)
            return old
        for queue in (self._probation, self._kept, self._window):
            key = queue.oldest()
            if key is not None:
                return key
        raise AssertionError("an eviction was begun though every block is pinned")
