"""A KV cache of random bytes in the shapes vLLM gives its offloading workers, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch

from vllm_pd.vllm_compat import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor


def strided(blocks: int, page: int, gap: int = 0) -> torch.Tensor:
    """(blocks, page) random bytes whose rows are `page + gap` bytes apart."""
    storage = torch.randint(-128, 128, (blocks * (page + gap) + 1,), dtype=torch.int8)
    return storage.as_strided((blocks, page), (page + gap, 1))


def caches(tensors: list[torch.Tensor], groups: list[list[tuple[int, int]]]) -> Any:
    """Args: tensors of (blocks, page) bytes; per group, (tensor index, used bytes) of each layer."""
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor=t, page_size_bytes=t.shape[1]) for t in tensors],
        group_data_refs=[[CanonicalKVCacheRef(tensor_idx=i, page_size_bytes=n) for i, n in refs] for refs in groups],
    )
