"""The checksum of a block, computed for many blocks at once without holding Python's lock (see `block_pass`).

XXH3 over the padded block, seeded by its key and namespace: bytes of another block, however intact, do not pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import repeat

import numpy as np

from vllm_pd.kv_offload.segments import block_pass
from vllm_pd.kv_offload.segments.block_pass import Words

KIND = 3
"""Number of this checksum in segment headers. A segment with another one is not read."""


def seeds(namespace: bytes, keys: Iterable[bytes]) -> Words:
    """One for each key."""
    start = zlib.crc32(namespace)
    return np.fromiter(map(zlib.crc32, keys, repeat(start)), np.uint64)


def copy_and_sum(memory: int, stride: int, sources: Words, size: int, seeds: Words) -> Words:
    """Copy blocks to memory, one every `stride` bytes from an address on, and return their checksums.

    Args:
        stride: whole pages.
        sources: address of each block; valid, and not changed during the call.
        size: bytes of a block; what is between it and `stride` in memory counts too and is left as it is.
    """
    return block_pass.run(sources, addresses(memory, stride, len(seeds)), stride, size, seeds, padded_sources=False)[0]


def sums(memory: int, stride: int, seeds: Words) -> Words:
    """Checksums of the blocks that lie every `stride` bytes, whole pages, in memory from an address on."""
    sources = addresses(memory, stride, len(seeds))
    return block_pass.run(sources, np.zeros_like(sources), stride, 0, seeds, padded_sources=True)[0]


def addresses(memory: int, stride: int, count: int) -> Words:
    """Of blocks that lie every `stride` bytes from an address on."""
    return np.uint64(memory) + np.arange(count, dtype=np.uint64) * np.uint64(stride)
