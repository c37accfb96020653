"""The checksum of a block, and loops that compute it for many blocks without holding Python's lock.

XXH3 over the padded block, seeded by its key and namespace: bytes of another block, however intact, do not pass. Made
for the scheduler's process, whose main thread is busy in Python: a call per block has to win the lock back each time
(see `byte_copy`), so one call does a batch, and the copy to or from a buffer in the same pass, at what memory gives.
numba, which compiles it, is there with vLLM.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import zlib
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_pd.kv_offload.segments import xxh3 as xxh3_of

KIND = 3
"""Number of this checksum in segment headers. A segment with another one is not read."""

Words = NDArray[np.uint64]
"""Memory as 64-bit words; numbers of words, not bytes, are counted below."""


def seeds(namespace: bytes, keys: Iterable[bytes]) -> Words:
    """One for each key."""
    start = zlib.crc32(namespace)
    return np.fromiter(map(zlib.crc32, keys, repeat(start)), np.uint64)


def copy_and_sum(memory: Words, first: int, stride: int, sources: Words, size: int, seeds: Words) -> Words:
    """Copy blocks into `memory`, one every `stride` words from word `first` on, and return their checksums.

    Args:
        sources: address of each block; valid, and not changed during the call.
        size: bytes of a block; what is between it and `stride` in `memory` counts too and is left as it is.
    """
    return _pass(sources, _addresses(memory, first, stride, len(seeds)), stride, size, seeds, padded_sources=False)


def sums(memory: Words, first: int, stride: int, seeds: Words) -> Words:
    """Checksums of the blocks that lie every `stride` words, whole pages, in `memory` from word `first` on."""
    sources = _addresses(memory, first, stride, len(seeds))
    return _pass(sources, np.zeros_like(sources), stride, 0, seeds, padded_sources=True)


def check_and_copy(
    memory: Words, first: int, stride: int, seeds: Words, wanted: Words, targets: Words, size: int
) -> NDArray[np.bool_]:
    """Copy the blocks whose checksum is `wanted`; they lie every `stride` words in `memory` from word `first` on.

    Whether it is, is known only after the copy, which is made in the same pass: the target of a block that has another
    checksum may hold anything afterwards.

    Args:
        targets: address for each block, valid during the call; 0 for one that is not looked at.
        size: bytes to copy of each.

    Returns:
        Which have their checksum.
    """
    looked_at: NDArray[np.bool_] = targets != 0
    sources = np.where(looked_at, _addresses(memory, first, stride, len(seeds)), np.uint64(0))
    good: NDArray[np.bool_] = _pass(sources, targets, stride, size, seeds, padded_sources=True) == wanted
    return good & looked_at


def prepare() -> None:
    """Compile now (a second or two of this thread) and not in the first transfer."""
    _compiled()


def _addresses(memory: Words, first: int, stride: int, count: int) -> Words:
    return np.uint64(memory.ctypes.data + 8 * first) + np.arange(count, dtype=np.uint64) * np.uint64(8 * stride)


def _pass(sources: Words, targets: Words, stride: int, size: int, seeds: Words, *, padded_sources: bool) -> Words:
    """Sums over the padded blocks, which are sources or targets; copies `size` bytes of each that has a target."""
    found = np.zeros(len(seeds), np.uint64)
    _compiled()(sources, targets, 8 * stride, size, padded_sources, seeds, found)
    return found


@functools.cache
def _compiled() -> Callable[..., None]:
    numba = importlib.import_module("numba")
    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes = [ctypes.c_size_t] * 3
    memmove.restype = ctypes.c_size_t
    xxh3, fence = xxh3_of.build()
    u64: Any = np.uint64
    none, align = u64(0), u64(xxh3_of.STREAM_ALIGN)
    secret_words, lane_words = xxh3_of.SECRET_WORDS, xxh3_of.LANES

    def loop(sources, targets, stride, size, padded_sources, seeds, sums):  # type: ignore[no-untyped-def]
        secret, lanes = np.empty(secret_words, np.uint64), np.empty(lane_words, np.uint64)
        for i in range(len(seeds)):
            source, target = sources[i], targets[i]
            if source == none:
                continue
            if size != stride or target % align != none:
                if target != none:
                    memmove(target, source, size)
                source, target = source if padded_sources else target, none
            sums[i] = xxh3(source, target, stride, seeds[i], secret, lanes)
        fence()

    # The explicit signature compiles now.
    build: Callable[[Any], Callable[..., None]] = numba.njit(
        "void(uint64[::1], uint64[::1], uint64, uint64, boolean, uint64[::1], uint64[::1])", nogil=True
    )
    return build(loop)
