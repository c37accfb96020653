"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm_pd.kv_offload.policies.base import Ghosts, Key, Queue, QueuePolicy

SMALL_SHARE = 0.1
"""Of the capacity, for blocks that nothing has asked for again; the paper's."""
MAX_USES = 3


class S3Fifo(QueuePolicy):
    """A small queue for new blocks, a main one for those used again, both FIFO; ghosts of the small one.

    A block that leaves the small queue unused goes, and if it comes back soon it begins in the main one.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_size = max(1, int(capacity * SMALL_SHARE))
        self._small = Queue(self._pinned)
        self._main = Queue(self._pinned)
        self._uses: dict[Key, int] = {}
        self._ghosts = Ghosts(capacity)

    def accessed(self, chain: Sequence[Key], reused: Collection[Key], loaded: Collection[Key] = ()) -> None:
        for key in reversed(chain):
            if key not in self._home:
                continue
            if key in reused:
                self._uses[key] = min(self._uses.get(key, 0) + 1, MAX_USES)
            else:
                # Stored from its beginning on, and a FIFO would let that go first.
                self._place(key, self._home[key])

    def clear(self) -> None:
        super().clear()
        self._uses.clear()
        self._ghosts.clear()

    def _queues(self) -> Collection[Queue]:
        return self._small, self._main

    def _queue_of_new(self, key: Key) -> Queue:
        if key in self._ghosts:
            self._ghosts.discard(key)
            return self._main
        return self._small

    def _forget(self, key: Key) -> None:
        self._uses.pop(key, None)

    def _victim(self) -> Key:
        while True:
            queues = (self._small, self._main) if len(self._small) >= self._small_size else (self._main, self._small)
            key = queues[0].oldest()
            if key is None:
                key = queues[1].oldest()
            assert key is not None
            uses = self._uses.pop(key, 0)
            if self._home[key] is self._small:
                if not uses:
                    self._ghosts.note(key)
                    return key
                self._place(key, self._main)
            elif uses:
                if uses > 1:
                    self._uses[key] = uses - 1
                self._place(key, self._main)
            else:
                return key
