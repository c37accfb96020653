"""SIEVE (Zhang et al., "SIEVE is simpler than LRU", NSDI 2024)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm_pd.kv_offload.policies.base import Key, Queue, QueuePolicy


class Sieve(QueuePolicy):
    """One FIFO list and a hand that moves from its old end to the young one, over and over.

    The hand lets a block go unless it was used since the hand last passed it; who stays keeps its place. The list is
    kept as what the hand has passed and what lies ahead of it.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ahead = Queue(self._pinned)
        self._passed = Queue(self._pinned)
        self._used: set[Key] = set()

    def accessed(self, chain: Sequence[Key], reused: Collection[Key], loaded: Collection[Key] = ()) -> None:
        for key in reversed(chain):
            if key not in self._home:
                continue
            if key in reused:
                self._used.add(key)
            else:
                # Stored from its beginning on, and a FIFO would let that go first.
                self._place(key, self._ahead)

    def clear(self) -> None:
        super().clear()
        self._used.clear()

    def _queues(self) -> Collection[Queue]:
        return self._ahead, self._passed

    def _queue_of_new(self, key: Key) -> Queue:
        return self._ahead

    def _forget(self, key: Key) -> None:
        self._used.discard(key)

    def _victim(self) -> Key:
        while True:
            key = self._ahead.oldest()
            if key is None:
                self._ahead, self._passed = self._passed, self._ahead
                continue
            if key not in self._used:
                return key
            self._used.discard(key)
            self._place(key, self._passed)
