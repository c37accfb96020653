"""Copies byte ranges without holding Python's lock.

The model runs in the same process. With a call per range (ctypes.memmove, numpy slices) the copying thread must take
the lock back after each one, and a main thread that is busy in Python gives it up only every 5 ms: 21,000 ranges of
12 KiB were measured at 0.02 GB/s beside such a thread. One compiled loop over all ranges runs at the same 8 GB/s with
and without it. numba compiles it in about 0.3 s; vLLM itself depends on numba.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from typing import Any

from vllm_pd.kv_offload.copy_plan import CopyPlan


def copy(plan: CopyPlan) -> None:
    """Copy every range of `plan`. The caller guarantees that its addresses are valid and stay so."""
    if len(plan.size):
        compiled()(plan.src, plan.dst, plan.size)


@functools.cache
def compiled() -> Callable[[Any, Any, Any], None]:
    """The machine-code loop; the first call compiles it."""
    numba = importlib.import_module("numba")
    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes = [ctypes.c_size_t] * 3
    memmove.restype = ctypes.c_size_t

    def loop(src, dst, size):  # type: ignore[no-untyped-def]
        for i in range(src.shape[0]):
            memmove(dst[i], src[i], size[i])

    # The explicit signature compiles now, in the thread that builds the worker, and not in the first transfer.
    build: Callable[[Any], Callable[[Any, Any, Any], None]] = numba.njit(
        "void(uint64[::1], uint64[::1], uint64[::1])", nogil=True
    )
    return build(loop)
