"""The one loop over blocks: read them from files if they are not in memory, compute their checksums, copy them.

Made for the scheduler's process, whose main thread is busy in Python: a call per block has to win Python's lock back
each time (see `byte_copy`), so one call does a batch, reads included, and holds no lock. numba, which compiles it, is
there with vLLM.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_pd.kv_offload.block_io.aligned import ALIGNMENT
from vllm_pd.kv_offload.segments import gate
from vllm_pd.kv_offload.segments import xxh3 as xxh3_of

Words = NDArray[np.uint64]

UNREAD, DONE, REFUSED = 0, 1, 2
"""States of a block: not looked at, or it could not be read; summed and copied; its gate was closed."""

REQUEST_BYTES = 1 << 20
"""The most that is read at once: a disk needs no more if several readers ask, and it is still in the cache when it is
summed and copied."""

IN_MEMORY = -1
"""In place of a descriptor: nothing is to be read."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Blocks that are neighbours in a file and where they are read to; one entry each.

    Attributes:
        fds: descriptors, as int32; what is negative and not `IN_MEMORY` is not read.
        offsets: in the file, bytes, as int64.
        counts: of blocks, as int64; all of them together are the blocks of the call, in its order. One where a block is
            longer than a request.
    """

    fds: NDArray[np.int32]
    offsets: NDArray[np.int64]
    counts: NDArray[np.int64]

    @staticmethod
    def in_memory(count: int) -> Runs:
        return Runs(np.full(1, IN_MEMORY, np.int32), np.zeros(1, np.int64), np.full(1, count, np.int64))


def run(
    sources: Words,
    targets: Words,
    stride: int,
    size: int,
    seeds: Words,
    *,
    padded_sources: bool,
    gates: Words | None = None,
    runs: Runs | None = None,
    pread: int = 0,
    request: int = REQUEST_BYTES,
) -> tuple[Words, NDArray[np.int8]]:
    """Sums over the padded blocks, and copies of them.

    Args:
        sources: address of each block; 0 for one that is not looked at. Of a run, each block is where the one before
            it ends; a later run may be read to the same place.
        targets: address to copy each to, 0 to copy nothing.
        stride: bytes of a padded block, whole pages.
        size: bytes to copy of each.
        padded_sources: whether the padding is at the sources, or at the targets.
        gates: of each block, where `Gate.address` tells whether its target may be written to; 0 for none.
        runs: what is read first; nothing by default.
        pread: address of the function that reads, as pread(2); called without Python's lock.
        request: bytes. A longer block is read in pieces of this size, whole pages, each summed and copied, inside its
            gate, before the next is read to the same place.

    Returns:
        For each block its sum, and its state: only with `DONE` is there a sum and a copy. The target of another was not
        touched, or holds the beginning of a block that was read in pieces.
    """
    count = len(seeds)
    sums, states = np.zeros(count, np.uint64), np.zeros(count, np.int8)
    if gates is None:
        gates = np.zeros(count, np.uint64)
    if runs is None:
        runs = Runs.in_memory(count)
    _compiled()(
        pread,
        runs.fds,
        runs.offsets,
        runs.counts,
        sources,
        targets,
        gates,
        stride,
        size,
        request,
        padded_sources,
        seeds,
        sums,
        states,
    )
    return sums, states


def prepare() -> None:
    """Compile now (a second or two of this thread) and not in the first transfer."""
    _compiled()
    gate.prepare()


@functools.cache
def _compiled() -> Callable[..., None]:
    numba = importlib.import_module("numba")
    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes = [ctypes.c_size_t] * 3
    memmove.restype = ctypes.c_size_t
    xxh3 = xxh3_of.build()
    sum_begin, sum_add, sum_end, fence = xxh3.begin, xxh3.add, xxh3.end, xxh3.fence
    add, call_pread = gate.intrinsic(), _pread_intrinsic()
    u64: Any = np.uint64
    i64: Any = np.int64
    none, align = u64(0), u64(xxh3_of.STREAM_ALIGN)
    secret_words, lane_words = xxh3_of.SECRET_WORDS, xxh3_of.LANES
    in_memory, sector = IN_MEMORY, i64(ALIGNMENT)

    @numba.njit
    def read(pread, fd, address, length, offset):  # type: ignore[no-untyped-def]
        """Whether all of it came. After a part of a sector a direct read cannot go on."""
        done = i64(0)
        while done < length:
            moved = call_pread(pread, fd, address + u64(done), u64(length - done), offset + done)
            if moved <= 0 or (moved % sector != 0 and done + moved < length):
                return False
            done += moved
        return True

    @numba.njit
    def enter(gate_word):  # type: ignore[no-untyped-def]
        """Whether the target may be written to, until `leave`."""
        if gate_word != none and add(gate_word, i64(1)) < 0:
            add(gate_word, i64(-1))
            return False
        return True

    @numba.njit
    def leave(gate_word):  # type: ignore[no-untyped-def]
        if gate_word != none:
            # The copy goes past the cache: whoever finds the gate closed must find it made, too.
            fence()
            add(gate_word, i64(-1))

    @numba.njit
    def in_pieces(  # type: ignore[no-untyped-def]
        pread, fd, offset, request, source, target, gate_word, stride, seed, secret, lanes
    ):
        """Sum and state of a block that is longer than a request."""
        sum_begin(seed, secret, lanes)
        done = u64(0)
        while True:
            length = min(request, stride - done)
            if not read(pread, fd, source, i64(length), offset + i64(done)):
                return none, UNREAD
            if not enter(gate_word):
                return none, REFUSED
            if done + length == stride:
                found = sum_end(source, target + done, length, stride, secret, lanes)
                leave(gate_word)
                return found, DONE
            sum_add(source, target + done, length, secret, lanes)
            leave(gate_word)
            done += length

    def loop(  # type: ignore[no-untyped-def]
        pread, fds, offsets, counts, sources, targets, gates, stride, size, request, padded_sources, seeds, sums, states
    ):
        secret, lanes = np.empty(secret_words, np.uint64), np.empty(lane_words, np.uint64)
        following = i64(0)
        for run in range(len(counts)):
            first, following, fd = following, following + counts[run], fds[run]
            if fd != in_memory:
                if fd < 0:
                    continue
                source, target = sources[first], targets[first]
                if stride > request and size == stride and source != none and target != none and target % align == none:
                    sums[first], states[first] = in_pieces(
                        pread,
                        fd,
                        offsets[run],
                        request,
                        source,
                        target,
                        gates[first],
                        stride,
                        seeds[first],
                        secret,
                        lanes,
                    )
                    continue
                if not read(pread, fd, sources[first], counts[run] * i64(stride), offsets[run]):
                    continue
            for i in range(first, following):
                source, target, gate_word = sources[i], targets[i], gates[i]
                if source == none:
                    continue
                if not enter(gate_word):
                    states[i] = REFUSED
                    continue
                if size != stride or target % align != none:
                    if target != none:
                        memmove(target, source, size)
                    source, target = source if padded_sources else target, none
                sum_begin(seeds[i], secret, lanes)
                sums[i] = sum_end(source, target, stride, stride, secret, lanes)
                leave(gate_word)
                states[i] = DONE
        fence()

    words, signed = "uint64[::1]", "int64[::1]"
    # The explicit signature compiles now.
    build: Callable[[Any], Callable[..., None]] = numba.njit(
        f"void(uint64, int32[::1], {signed}, {signed}, {words}, {words}, {words}, uint64, uint64, uint64, boolean, "
        f"{words}, {words}, int8[::1])",
        nogil=True,
    )
    return build(loop)


def _pread_intrinsic() -> Callable[..., Any]:
    """A call of the function at an address, which is known only then: a test reads through one of its own."""
    ir = importlib.import_module("llvmlite.ir")
    types = importlib.import_module("numba").types
    word, number = ir.IntType(64), ir.IntType(32)
    signature = ir.FunctionType(word, [number, word, word, word])

    def generate(_context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        function, *others = arguments
        return builder.call(builder.inttoptr(function, signature.as_pointer()), others)

    @importlib.import_module("numba.extending").intrinsic  # type: ignore[untyped-decorator]
    def call_pread(_context, function, fd, address, length, offset):  # type: ignore[no-untyped-def]
        return types.int64(types.uint64, types.int32, types.uint64, types.uint64, types.int64), generate

    return call_pread  # type: ignore[no-any-return]
