"""The checksum of a block, and loops that compute it for many blocks without holding Python's lock.

XXH64 over the padded block, seeded by its key and namespace: bytes of another block, however intact, do not pass. Made
for the scheduler's process, whose main thread is busy in Python: a call per block has to win the lock back each time
(see `byte_copy`), so one call does a batch. numba compiles it to 20 GB/s a core, which is what memory gives; the zlib
of the standard library does 6, and numba is there with vLLM.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

KIND = 2
"""Number of this checksum in segment headers. A segment with another one is not read."""

Words = NDArray[np.uint64]
"""Memory as 64-bit words; numbers of words, not bytes, are counted below."""

_P1, _P2, _P3, _P4 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63
"""Primes of XXH64 (github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md)."""


def seeds(namespace: bytes, keys: Iterable[bytes]) -> Words:
    """One for each key."""
    start = zlib.crc32(namespace)
    return np.fromiter((zlib.crc32(key, start) for key in keys), np.uint64)


def copy_and_sum(memory: Words, first: int, stride: int, sources: Words, size: int, seeds: Words) -> Words:
    """Copy blocks into `memory`, one every `stride` words from word `first` on, and return their checksums.

    Args:
        sources: address of each block; valid, and not changed during the call.
        size: bytes of a block; what is between it and `stride` in `memory` counts too and is left as it is.
    """
    sums = np.empty(len(seeds), np.uint64)
    _compiled()[0](memory, first, stride, sources, size, seeds, sums)
    return sums


def sums(memory: Words, first: int, stride: int, seeds: Words) -> Words:
    """Checksums of the blocks that lie every `stride` words in `memory` from word `first` on. A multiple of 4 words."""
    found = np.empty(len(seeds), np.uint64)
    _compiled()[1](memory, first, stride, seeds, found)
    return found


def check_and_copy(
    memory: Words, first: int, stride: int, seeds: Words, wanted: Words, targets: Words, size: int
) -> NDArray[np.bool_]:
    """Copy the blocks whose checksum is `wanted`; they lie every `stride` words in `memory` from word `first` on.

    One by one: each is copied while it is still in the processor's cache.

    Args:
        targets: address for each block, valid during the call; 0 for one that is not looked at.
        size: bytes to copy of each.

    Returns:
        Which were copied.
    """
    good = np.zeros(len(seeds), np.bool_)
    _compiled()[2](memory, first, stride, seeds, wanted, targets, size, good)
    return good


def prepare() -> None:
    """Compile now (about a second of this thread) and not in the first transfer."""
    _compiled()


@functools.cache
def _compiled() -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    numba = importlib.import_module("numba")
    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes = [ctypes.c_size_t] * 3
    memmove.restype = ctypes.c_size_t
    inline: Any = numba.njit
    # With signed numbers each access would ask whether the index counts from the end: half the speed.
    u64: Any = np.uint64
    p1, p2, p3, p4 = u64(_P1), u64(_P2), u64(_P3), u64(_P4)

    @inline
    def rotated(x, bits):  # type: ignore[no-untyped-def]
        return (x << u64(bits)) | (x >> u64(64 - bits))

    @inline
    def mixed(lane, word):  # type: ignore[no-untyped-def]
        return rotated(lane + word * p2, 31) * p1

    @inline
    def merged(h, lane):  # type: ignore[no-untyped-def]
        return (h ^ mixed(u64(0), lane)) * p1 + p4

    @numba.njit("uint64(uint64[::1], uint64, uint64, uint64)", nogil=True)  # type: ignore[untyped-decorator]
    def xxh64(words, start, count, seed):  # type: ignore[no-untyped-def]
        a, b, c, d = seed + p1 + p2, seed + p2, seed, seed - p1
        i, end = start, start + count
        while i < end:
            a = mixed(a, words[i])
            b = mixed(b, words[i + u64(1)])
            c = mixed(c, words[i + u64(2)])
            d = mixed(d, words[i + u64(3)])
            i += u64(4)
        h = rotated(a, 1) + rotated(b, 7) + rotated(c, 12) + rotated(d, 18)
        h = merged(merged(merged(merged(h, a), b), c), d) + count * u64(8)
        h = (h ^ (h >> u64(33))) * p2
        h = (h ^ (h >> u64(29))) * p3
        return h ^ (h >> u64(32))

    @numba.njit("void(uint64[::1], uint64, uint64, uint64[::1], uint64, uint64[::1], uint64[::1])", nogil=True)  # type: ignore[untyped-decorator]
    def copy_and_sum(memory, first, stride, sources, size, seeds, sums):  # type: ignore[no-untyped-def]
        base = u64(memory.ctypes.data)
        for i in range(len(seeds)):
            at = first + u64(i) * stride
            # Block by block: the sum is taken while the copy is still in the processor's cache.
            memmove(base + at * u64(8), sources[i], size)
            sums[i] = xxh64(memory, at, stride, seeds[i])

    @numba.njit("void(uint64[::1], uint64, uint64, uint64[::1], uint64[::1])", nogil=True)  # type: ignore[untyped-decorator]
    def sums(memory, first, stride, seeds, found):  # type: ignore[no-untyped-def]
        for i in range(len(seeds)):
            found[i] = xxh64(memory, first + u64(i) * stride, stride, seeds[i])

    @numba.njit(
        "void(uint64[::1], uint64, uint64, uint64[::1], uint64[::1], uint64[::1], uint64, boolean[::1])", nogil=True
    )  # type: ignore[untyped-decorator]
    def check_and_copy(memory, first, stride, seeds, wanted, targets, size, good):  # type: ignore[no-untyped-def]
        base = u64(memory.ctypes.data)
        for i in range(len(seeds)):
            at = first + u64(i) * stride
            if targets[i] != u64(0) and xxh64(memory, at, stride, seeds[i]) == wanted[i]:
                memmove(targets[i], base + at * u64(8), size)
                good[i] = True

    return copy_and_sum, sums, check_and_copy
