"""Eviction policies of the CPU tier: pure, without vllm or torch, so that a server and the simulator run the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_pd.kv_offload.policies.adaptive import Adaptive
from vllm_pd.kv_offload.policies.arc import Arc
from vllm_pd.kv_offload.policies.base import EvictionPolicy
from vllm_pd.kv_offload.policies.lru import Lru
from vllm_pd.kv_offload.policies.s3fifo import S3Fifo
from vllm_pd.kv_offload.policies.sieve import Sieve
from vllm_pd.kv_offload.policies.wtinylfu import WTinyLfu

POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = {
    "lru": Lru,
    "arc": Arc,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
    "wtinylfu": WTinyLfu,
    "adaptive": Adaptive,
}
"""By the name that `--pd-eviction` takes; each is called with the number of blocks that the tier holds."""

__all__ = ["POLICIES", "Adaptive", "Arc", "EvictionPolicy", "Lru", "S3Fifo", "Sieve", "WTinyLfu"]
