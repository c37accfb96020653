"""What a `SplitLru` of another share or size would have hit. Pure.

A shadow holds no blocks, so requests come to it whole, one after the other, and nothing is ever in use while another
one is served. That leaves a few dictionary operations for each key: a fifth of what a policy with pins costs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from vllm_pd.kv_offload.policies.base import Key
from vllm_pd.kv_offload.policies.split_lru import LRU_SHARE


class Shadow:
    """Keys as `SplitLru` would keep them."""

    def __init__(self, capacity: int, share: float) -> None:
        self.capacity = capacity
        self.share = share
        self._once: OrderedDict[Key, int] = OrderedDict()
        self._again: OrderedDict[Key, int] = OrderedDict()
        """Oldest first, each with when it was used."""
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._now = 0

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: Key) -> bool:
        return key in self._once or key in self._again

    def request(self, sample: Sequence[tuple[bool, Key]]) -> int:
        """A request uses blocks, and those that are not here are stored, if there is room for all of them.

        Args:
            sample: different keys in prompt order, each with whether the request needed it from the tier.

        Returns:
            How many of the needed blocks hit, up to the first that did not.
        """
        once, again = self._once, self._again
        # Out of the queues while others are evicted, and the youngest afterwards.
        here: set[Key] = set()
        held_once = 0
        for _, key in sample:
            if once.pop(key, None) is not None:
                held_once += 1
                here.add(key)
            elif again.pop(key, None) is not None:
                here.add(key)
        hits = 0
        for needed, key in sample:
            if needed:
                if key not in here:
                    break
                hits += 1
        excess = len(self) + len(sample) - self.capacity
        fits = excess <= len(self)
        if fits:
            self._evict(excess, held_once)
        ghosts, now = self._ghosts, self._now
        for _, key in reversed(sample):
            if key in here:
                now += 1
                again[key] = now
            elif fits:
                now += 1
                if key in ghosts:
                    del ghosts[key]
                    again[key] = now
                else:
                    once[key] = now
        self._now = now
        return hits

    def clear(self) -> None:
        """Forget everything."""
        self._once.clear()
        self._again.clear()
        self._ghosts.clear()

    def _evict(self, count: int, held_once: int) -> None:
        """The oldest go.

        Args:
            held_once: keys that belong to `_once` besides those that are there.
        """
        once, again, ghosts = self._once, self._again, self._ghosts
        most_once = self.share * self.capacity
        for _ in range(count):
            if not once or not again:
                from_once = bool(once)
            elif self.share >= LRU_SHARE:
                from_once = next(iter(once.values())) < next(iter(again.values()))
            else:
                from_once = len(once) + held_once > most_once
            if from_once:
                key, _ = once.popitem(last=False)
                ghosts[key] = None
                if len(ghosts) > self.capacity:
                    ghosts.popitem(last=False)
            else:
                again.popitem(last=False)
