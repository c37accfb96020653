"""Copies between the KV cache and the CPU tier on the CPU platform, as a share of what memcpy does with as many bytes.

The KV cache and the tier are larger than the processor's caches; the blocks of a job are scattered on both sides, so
that none can be merged with its neighbour. In each turn memcpy and the worker move the same number of bytes; the best
of several turns counts. A store takes one core, so it is compared with one thread; a load is copied on several, and is
compared with as many threads that copy one contiguous piece each. `submit` is what a job costs the engine's own thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Target, progress

NAME = "copies to and from the CPU tier"

KIB, MIB = 1 << 10, 1 << 20
SHARE = 0.8
SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
MOVED_BYTES = 256 * MIB
JOB_BYTES = 64 * MIB
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second, and seconds that one submission took."""

    memcpy: float
    memcpy_many: float
    threads: int
    store: float
    load: float
    submit: float


def run(quick: bool) -> tuple[list[dict[str, Any]], list[Target]]:
    """Results and targets."""
    results: list[dict[str, Any]] = []
    targets: list[Target] = []
    for size in SIZES[::2] if quick else SIZES:
        speeds = measure(size, MOVED_BYTES // 4 if quick else MOVED_BYTES, turns=3 if quick else 7)
        name = f"{size // KIB} KiB"
        progress(f"  {name}: store {_gb(speeds.store)}, load {_gb(speeds.load)} GB/s")
        store, load = speeds.store / speeds.memcpy, speeds.load / speeds.memcpy_many
        results.append(
            {
                "block_kib": size // KIB,
                "memcpy_gb_s": _gb(speeds.memcpy),
                "store_gb_s": _gb(speeds.store),
                "store_share": round(store, 3),
                "threads": speeds.threads,
                "memcpy_threads_gb_s": _gb(speeds.memcpy_many),
                "load_gb_s": _gb(speeds.load),
                "load_share": round(load, 3),
                "submit_us": round(speeds.submit * 1e6),
            }
        )
        targets += [
            Target.at_least(f"{name}: store, share of memcpy", round(store, 3), SHARE),
            Target.at_least(f"{name}: load, share of memcpy", round(load, 3), SHARE),
        ]
    return results, targets


def measure(block_bytes: int, moved_bytes: int, turns: int) -> Speeds:
    """Copy `moved_bytes` in blocks of `block_bytes`, each way, `turns` times."""
    import torch

    from vllm_pd.kv_offload import byte_copy
    from vllm_pd.kv_offload.dram_worker import DramOffloadingWorker
    from vllm_pd.vllm_compat import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        CPULoadStoreSpec,
        GPULoadStoreSpec,
    )

    count = moved_bytes // block_bytes
    cache = torch.zeros((count, block_bytes), dtype=torch.int8)
    cache.random_(-128, 127)
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor=cache, page_size_bytes=block_bytes)],
        group_data_refs=[[CanonicalKVCacheRef(tensor_idx=0, page_size_bytes=block_bytes)]],
    )
    worker = DramOffloadingWorker(caches, 1, count)
    threads = byte_copy.ParallelCopy(byte_copy.cores_of_process()).threads
    source, target = (np.ones(moved_bytes, dtype=np.uint8) for _ in range(2))
    chance = np.random.default_rng(0)
    blocks, chunks = chance.permutation(count), chance.permutation(count)
    per_job = max(1, min(JOB_BYTES, moved_bytes) // block_bytes)
    jobs = [slice(at, at + per_job) for at in range(0, count, per_job)]
    submits: list[float] = []
    numbers = iter(range(1 << 30))

    def transfer(submit: Callable[..., bool], load: bool) -> float:
        began = time.perf_counter()
        for job in jobs:
            number = next(numbers)
            block_spec = GPULoadStoreSpec(blocks[job], group_sizes=[len(blocks[job])], block_indices=[0])
            sides = (CPULoadStoreSpec(chunks[job]), block_spec) if load else (block_spec, CPULoadStoreSpec(chunks[job]))
            asked = time.perf_counter()
            submit(number, *sides)
            submits.append(time.perf_counter() - asked)
            worker.wait({number})
        return time.perf_counter() - began

    best = {name: float("inf") for name in ("memcpy", "many", "store", "load")}
    try:
        for turn in range(turns + 1):
            seconds = {
                "memcpy": _copy(source, target, 1),
                "many": _copy(source, target, threads),
                "store": transfer(worker.submit_store, load=False),
                "load": transfer(worker.submit_load, load=True),
            }
            worker.get_finished()
            # The first turn meets memory that nobody has written to yet.
            if turn:
                best = {name: min(best[name], seconds[name]) for name in best}
    finally:
        worker.shutdown()
    return Speeds(
        *(moved_bytes / best[name] for name in ("memcpy", "many")),
        threads,
        *(moved_bytes / best[name] for name in ("store", "load")),
        min(submits),
    )


def _copy(source: NDArray[np.uint8], target: NDArray[np.uint8], threads: int) -> float:
    """Seconds that so many threads take to copy a part each."""
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    others = [threading.Thread(target=np.copyto, args=(to, from_)) for from_, to in parts[1:]]
    began = time.perf_counter()
    for thread in others:
        thread.start()
    np.copyto(parts[0][1], parts[0][0])
    for thread in others:
        thread.join(PATIENCE_S)
    return time.perf_counter() - began


def _gb(speed: float) -> float:
    return round(speed / 1e9, 2)
