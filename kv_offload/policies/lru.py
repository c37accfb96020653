"""Least recently used."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm_pd.kv_offload.policies.base import Key, Queue, QueuePolicy


class Lru(QueuePolicy):
    """The block that no request has used for longest goes; of one request the end of the prompt goes first.

    As vLLM's `LRUCachePolicy`, which is what a server with `lru` runs; this one is for comparison and the simulator.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue = Queue(self._pinned)

    def accessed(self, chain: Sequence[Key], reused: Collection[Key], loaded: Collection[Key] = ()) -> None:
        for key in reversed(chain):
            if key in self._home:
                self._place(key, self._queue)

    def _queues(self) -> Collection[Queue]:
        return (self._queue,)

    def _queue_of_new(self, key: Key) -> Queue:
        return self._queue

    def _victim(self) -> Key:
        key = self._queue.oldest()
        assert key is not None
        return key
