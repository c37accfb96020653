"""The policy that finds out by itself how much of the tier blocks deserve that were used once."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm_pd.kv_offload.policies.base import Key
from vllm_pd.kv_offload.policies.shadow import Shadow
from vllm_pd.kv_offload.policies.split_lru import LRU_SHARE, SplitLru

SHARES = (0.05, 0.2, 0.4, 0.7, LRU_SHARE)
FIRST_SHARE = 0.4
"""In force until something is known; on its own it is seldom far from the best."""

SAMPLE_BLOCKS = 512
"""What a shadow holds at least, unless the whole tier is smaller: fewer say too little."""
MOST_SAMPLED = 5
"""At least one key in 2**5 is sampled: larger shadows cost time and say no more."""
MEMORY = 4
"""Uses of so many times as many blocks as the tier holds, then what was counted is worth half."""
MARGIN = 1.02
"""By which another share must be better before it is taken: each change costs some blocks that the old one kept."""


class Adaptive(SplitLru):
    """A `SplitLru` whose share follows what happens.

    For each candidate share a shadow, which holds keys only, follows a sample of the keys at a size smaller in the same
    measure, and counts what would have hit. The share of the shadow with the most hits lately is in force. One of the
    candidates is LRU, so that where nothing beats it this is LRU. The shadows together hold at most a quarter as many
    keys as the tier has blocks, or `SAMPLE_BLOCKS` each if that is more.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, FIRST_SHARE)
        bits = 0
        while bits < MOST_SAMPLED and capacity >> (bits + 1) >= SAMPLE_BLOCKS:
            bits += 1
        self._mask = (1 << bits) - 1
        self._shadows = [Shadow(capacity >> bits, share) for share in SHARES]
        self._hits = [0.0] * len(SHARES)
        self._seen = 0

    def accessed(self, chain: Sequence[Key], reused: Collection[Key], loaded: Collection[Key] = ()) -> None:
        super().accessed(chain, reused, loaded)
        # What the GPU had is no hit of this tier. A request that loads does not show it here; of one that does not, it
        # is what the tier has of the prompt's beginning, which would have been loaded otherwise.
        needed = 0 if loaded else next((i for i, key in enumerate(chain) if key not in reused), len(chain))
        sample = [(i >= needed, key) for i, key in enumerate(chain) if not _bits(key) & self._mask]
        if sample:
            for i, shadow in enumerate(self._shadows):
                self._hits[i] += shadow.request(sample)
            self._choose()
        self._seen += len(chain)
        if self._seen >= MEMORY * self.capacity:
            self._seen = 0
            self._hits = [hits / 2 for hits in self._hits]

    def clear(self) -> None:
        super().clear()
        for shadow in self._shadows:
            shadow.clear()
        self._hits = [0.0] * len(SHARES)
        self._seen = 0
        self.share = FIRST_SHARE

    def _choose(self) -> None:
        best = max(range(len(SHARES)), key=self._hits.__getitem__)
        if self._hits[best] > MARGIN * self._hits[SHARES.index(self.share)]:
            self.share = SHARES[best]


def _bits(key: Key) -> int:
    # Keys are digests, to which vLLM appends 4 bytes that say of which kind of layer the block is.
    return key[-5] if len(key) > 4 else key[0]
