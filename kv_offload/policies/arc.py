"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003), with vLLM's treatment of requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm_pd.kv_offload.policies.base import Ghosts, Key, Queue, QueuePolicy


class Arc(QueuePolicy):
    """Blocks used once and blocks used again, each least recently used first; their ghosts say which side should grow.

    As vLLM's `ARCCachePolicy`, which is what a server with `arc` runs; this one is for comparison and the simulator.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once = Queue(self._pinned)
        self._again = Queue(self._pinned)
        self._gone_once = Ghosts(capacity)
        self._gone_again = Ghosts(capacity)
        self._target = 0.0
        """How many blocks used once there should be."""

    def missed(self, keys: Sequence[Key]) -> None:
        once, again = self._gone_once, self._gone_again
        for key in reversed(keys):
            if key in once:
                self._target = min(self._target + max(1.0, len(again) / len(once)), self.capacity)
                once.note(key)
            elif key in again:
                self._target = max(self._target - max(1.0, len(once) / len(again)), 0.0)
                again.note(key)

    def accessed(self, chain: Sequence[Key], reused: Collection[Key], loaded: Collection[Key] = ()) -> None:
        for key in reversed(chain):
            home = self._home.get(key)
            if home is not None:
                self._place(key, self._again if key in reused else home)

    def clear(self) -> None:
        super().clear()
        self._gone_once.clear()
        self._gone_again.clear()
        self._target = 0.0

    def _queues(self) -> Collection[Queue]:
        return self._once, self._again

    def _queue_of_new(self, key: Key) -> Queue:
        self._gone_once.discard(key)
        self._gone_again.discard(key)
        return self._once

    def _victim(self) -> Key:
        first, second = self._once, self._again
        if len(first) < int(self._target):
            first, second = second, first
        key = first.oldest()
        if key is None:
            key = second.oldest()
        assert key is not None
        (self._gone_once if self._home[key] is self._once else self._gone_again).note(key)
        return key
