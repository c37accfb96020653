"""Our eviction policies as vLLM's CPU tier asks for them: by name, through its `CachePolicyFactory`.

vLLM keeps `lru` and `arc` for its own; the other names of `policies.POLICIES` are added, and an option
`eviction_policy` of the tier chooses among all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from vllm_pd.kv_offload import policies
from vllm_pd.kv_offload.policies.base import QueuePolicy
from vllm_pd.vllm_compat import CachePolicy, CachePolicyFactory, ChunkStatus, OffloadKey, ReqContext, order_request_keys


class PolicyAdapter(CachePolicy):  # type: ignore[misc]
    """A pure policy together with vLLM's record of each block. vLLM's scheduler calls it, from one thread."""

    make: ClassVar[type[QueuePolicy]]

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._policy = type(self).make(cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._fresh: set[OffloadKey] = set()
        """Blocks that no request has finished with. What reads them is the SSD tier, which copies each one down."""
        self._loaded: set[OffloadKey] = set()
        """Blocks that some request has begun to read since one has last finished with them."""

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        """A new block; vLLM 0.33 says for which request."""
        self._chunks[key] = chunk
        self._fresh.add(key)
        self._policy.insert(key)
        if chunk.ref_cnt == 0:
            self._policy.unpin(key)

    def remove(self, key: OffloadKey) -> None:
        """A store has failed. Raises KeyError: the block is not here."""
        self._drop(key)
        self._policy.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Blocks in prompt order that were used, outside the accounting by request."""
        chain = list(keys)
        ready = {key for key in chain if (chunk := self._chunks.get(key)) is not None and chunk.is_ready}
        self._policy.accessed(chain, ready)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._policy.missed(list(keys))

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        chain = order_request_keys(key_groups, req_context)
        self._policy.accessed(chain, reused_keys, self._loaded.intersection(reused_keys))
        self._loaded.difference_update(reused_keys)
        self._fresh.difference_update(chain)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """The blocks that go, exactly `n`, or None; then nothing has changed."""
        victims = self._policy.evict(n, protected)
        return None if victims is None else [(key, self._drop(key)) for key in victims]

    def clear(self) -> None:
        self._chunks.clear()
        self._fresh.clear()
        self._loaded.clear()
        self._policy.clear()

    def mark_evictable(self, key: OffloadKey) -> None:
        self._policy.unpin(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        if key not in self._fresh:
            self._loaded.add(key)
        self._policy.pin(key)

    def _drop(self, key: OffloadKey) -> ChunkStatus:
        self._fresh.discard(key)
        self._loaded.discard(key)
        return self._chunks.pop(key)


class S3FifoCachePolicy(PolicyAdapter):
    make = policies.S3Fifo


class SieveCachePolicy(PolicyAdapter):
    make = policies.Sieve


class WTinyLfuCachePolicy(PolicyAdapter):
    make = policies.WTinyLfu


class AdaptiveCachePolicy(PolicyAdapter):
    make = policies.Adaptive


_OURS = {
    "s3fifo": S3FifoCachePolicy,
    "sieve": SieveCachePolicy,
    "wtinylfu": WTinyLfuCachePolicy,
    "adaptive": AdaptiveCachePolicy,
}


def register() -> None:
    """Make our names known to vLLM. Idempotent."""
    for name, adapter in _OURS.items():
        if name not in CachePolicyFactory._registry:
            CachePolicyFactory.register_cache_policy(name, __name__, adapter.__name__)
