"""The KV blocks of a modelled engine: vLLM's GPU block pool, and the tiers below it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from vllm_pd.block_hash import BlockKey
from vllm_pd.kv_offload.policies.base import EvictionPolicy

ANONYMOUS: BlockKey = b""
"""Key of a full block whose content nothing will ever ask for: answers in a trace, which has no ids for them."""


class BlockPool:
    """GPU blocks with reference counts and a free queue, in the order that vLLM keeps.

    A free block keeps its content until it is handed out again. Blocks without a key are handed out first, then the
    least recently used; of one request the tail goes before the head. `changed` collects the keys whose presence
    changed.
    """

    def __init__(self, size: int, changed: set[BlockKey]) -> None:
        self.size = size
        self._changed = changed
        self._references = [0] * size
        self._keys: list[BlockKey | None] = [None] * size
        self._cached: dict[BlockKey, int] = {}
        self._twins: dict[BlockKey, list[int]] = {}
        """Further blocks with the same key: prompts computed side by side."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._cached

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def hits(self, keys: Sequence[BlockKey], limit: int) -> list[int]:
        """The blocks that hold the leading keys, at most `limit`."""
        found: list[int] = []
        cached = self._cached
        for key in keys[:limit]:
            block = cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these are in the free queue now: taking them leaves that many fewer to hand out."""
        return sum(not self._references[block] for block in blocks)

    def take(self, blocks: Iterable[int]) -> None:
        """Refer once more to blocks that are held."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, whose content is lost. The caller has checked `free`."""
        out: list[int] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if self._keys[block] is not None:
                self._forget(block)
            self._references[block] = 1
            out.append(block)
        return out

    def name(self, block: int, key: BlockKey) -> None:
        """State what a block holds."""
        self._keys[block] = key
        if key is ANONYMOUS:
            return
        if key in self._cached:
            self._twins.setdefault(key, []).append(block)
            return
        self._cached[key] = block
        self._changed.add(key)

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a request, named in prompt order."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def clear(self) -> bool:
        """Forget all content; refused (False) while a block is in use, as vLLM does."""
        if self.used:
            return False
        for block, key in enumerate(self._keys):
            if key is not None:
                self._forget(block)
        return True

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        self._keys[block] = None
        if key is ANONYMOUS or key is None:
            return
        twins = self._twins.get(key)
        if self._cached[key] != block:
            assert twins is not None
            twins.remove(block)
        elif twins:
            self._cached[key] = twins.pop()
        else:
            del self._cached[key]
            self._changed.add(key)
        if twins is not None and not twins:
            del self._twins[key]


class LowerTier:
    """Host memory or SSD behind the GPU: every block written to the GPU is written through, and a policy evicts."""

    def __init__(self, policy: EvictionPolicy, changed: set[BlockKey]) -> None:
        self.size = policy.capacity
        self._policy = policy
        self._changed = changed

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._policy

    def __len__(self) -> int:
        return len(self._policy)

    def add(self, keys: Sequence[BlockKey]) -> None:
        """Hold these blocks of one prompt, in prompt order, and count them as used; what cannot fit is left out."""
        keys = keys[: self.size]
        reused = {key for key in keys if key in self._policy}
        new = [key for key in keys if key not in reused]
        self._policy.missed(new)
        excess = len(self._policy) + len(new) - self.size
        if excess > 0:
            gone = self._policy.evict(excess, keys)
            assert gone is not None, "blocks of one prompt that fit into the tier found no room in it"
            self._changed.update(gone)
        for key in new:
            self._policy.insert(key)
            self._policy.unpin(key)
        self._changed.update(new)
        self._policy.accessed(keys, reused, reused)
