"""Two LRU lists, for blocks used once and blocks used again, with a fixed share of the room for the former."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm_pd.kv_offload.policies.base import Ghosts, Key, Queue, QueuePolicy

LRU_SHARE = 1.0
"""The share with which both lists are one: the oldest block goes, whatever its list."""


class SplitLru(QueuePolicy):
    """While blocks used once have more than `share` of the room, the oldest of them goes, else the oldest other one.

    A block that was used once, went, and is stored again soon after counts as used again. A small share lets blocks
    that nobody asks for again pass quickly and keeps the others long; that pays where the tier is small against what
    comes between two uses of a block.
    """

    def __init__(self, capacity: int, share: float) -> None:
        super().__init__(capacity)
        self.share = share
        self._once = Queue(self._pinned)
        self._again = Queue(self._pinned)
        self._used_at: dict[Key, int] = {}
        self._now = 0
        self._ghosts = Ghosts(capacity)

    def accessed(self, chain: Sequence[Key], reused: Collection[Key], loaded: Collection[Key] = ()) -> None:
        for key in reversed(chain):
            home = self._home.get(key)
            if home is not None:
                self._use(key, self._again if key in reused else home)

    def clear(self) -> None:
        super().clear()
        self._used_at.clear()
        self._ghosts.clear()

    def insert(self, key: Key) -> None:
        super().insert(key)
        self._now += 1
        self._used_at[key] = self._now

    def _queues(self) -> Collection[Queue]:
        return self._once, self._again

    def _queue_of_new(self, key: Key) -> Queue:
        if key in self._ghosts:
            self._ghosts.discard(key)
            return self._again
        return self._once

    def _forget(self, key: Key) -> None:
        del self._used_at[key]

    def _use(self, key: Key, queue: Queue) -> None:
        self._now += 1
        self._used_at[key] = self._now
        self._place(key, queue)

    def _victim(self) -> Key:
        key = self._oldest()
        if self._home[key] is self._once:
            self._ghosts.note(key)
        del self._used_at[key]
        return key

    def _oldest(self) -> Key:
        once, again = self._once.oldest(), self._again.oldest()
        if once is None or again is None:
            key = once if again is None else again
            assert key is not None
            return key
        if self.share >= LRU_SHARE:
            return min(once, again, key=self._used_at.__getitem__)
        return once if len(self._once) > self.share * self.capacity else again
