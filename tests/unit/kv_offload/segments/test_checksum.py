"""The checksum is XXH3, and depends on whose block it is."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_pd.kv_offload.block_io.aligned import AlignedMemory
from vllm_pd.kv_offload.segments import checksum

PAGE = 4096

VECTORS = [
    (bytes(PAGE), 0x0, 0x93D76FE148C689BA),
    (bytes(range(256)) * 64, 0x0, 0xC96B04EBEFA8F6DC),
    (bytes(range(256)) * 64, 0x9E3779B97F4A7C15, 0x04106C1CB6FF1EFB),
]
"""Data, seed and checksum, by the reference implementation (xxhsum)."""


def pages(count: int) -> NDArray[np.uint64]:
    """Zeros that begin where a page does, as all memory of the store does."""
    return np.frombuffer(AlignedMemory(count * PAGE).view, np.uint64)


def sum_of(data: bytes, seed: int) -> int:
    memory = np.frombuffer(bytearray(data), np.uint64)
    return int(checksum.sums(memory.ctypes.data, len(data), np.array([seed], np.uint64))[0])


@pytest.mark.parametrize(("data", "seed", "known"), VECTORS, ids=["zeros", "counting", "seeded"])
def test_it_is_xxh3(data: bytes, seed: int, known: int) -> None:
    assert sum_of(data, seed) == known


@pytest.mark.parametrize("size", [PAGE, PAGE - 100], ids=["whole pages", "padded"])
def test_blocks_are_copied_where_they_belong_and_summed_there(size: int) -> None:
    memory = pages(4)
    blocks = [np.frombuffer(bytes([i + 1]) * size, np.uint8) for i in range(2)]
    addresses = np.array([block.ctypes.data for block in blocks], np.uint64)
    seeds = checksum.seeds(b"n" * 32, [b"one", b"two"])
    found = checksum.copy_and_sum(memory.ctypes.data + PAGE, PAGE, addresses, size, seeds)
    raw = memory.tobytes()
    assert raw == bytes(PAGE) + b"".join(bytes([i + 1]) * size + bytes(PAGE - size) for i in range(2)) + bytes(PAGE)
    assert found.tolist() == [sum_of(raw[PAGE * (i + 1) : PAGE * (i + 2)], int(seeds[i])) for i in range(2)]
    assert checksum.sums(memory.ctypes.data + PAGE, PAGE, seeds).tolist() == found.tolist()


def test_the_same_bytes_under_another_key_or_namespace_have_another_sum() -> None:
    keys = [b"h" * 32 + bytes([0, 0, 0, group]) for group in range(4)]
    seeds = [int(seed) for name in (b"a" * 32, b"b" * 32) for seed in checksum.seeds(name, keys)]
    assert len({sum_of(bytes(PAGE), seed) for seed in seeds}) == 8


def test_every_single_wrong_bit_shows() -> None:
    data = bytearray(bytes(range(256)) * (PAGE // 256))
    right = sum_of(bytes(data), 1)
    for bit in range(0, 8 * PAGE, 37):
        data[bit // 8] ^= 1 << bit % 8
        assert sum_of(bytes(data), 1) != right
        data[bit // 8] ^= 1 << bit % 8
