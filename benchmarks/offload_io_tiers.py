"""What `benchmarks.offload_io` compares: the bare disk, the SSD tier's store, vLLM's own file tier; behind one shape.

All move the blocks of one memory, which is laid out as the CPU tier's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from benchmarks import raw_disk
from vllm_pd.kv_offload.block_io.aligned import AlignedMemory, open_file
from vllm_pd.kv_offload.block_io.choose import IOBackend, choose
from vllm_pd.kv_offload.segments import Rows, SegmentStore, StoreConfig

_libc = ctypes.CDLL(None, use_errno=True)

GIB = 1 << 30

WARM, MEASURED = 0, 1
"""Two sets of blocks, by the salt of their keys."""

JOBS_AT_LEAST = 16
JOB_BLOCKS = 64
"""Blocks of a job at most: a prompt of a few thousand tokens."""

POLL_S = 0.0005
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is moved: `count` blocks of `block_bytes`, block number i at that place in memory."""

    memory: AlignedMemory
    block_bytes: int
    count: int

    @property
    def size(self) -> int:
        return self.block_bytes * self.count

    @property
    def view(self) -> memoryview:
        """As vLLM's CPU tier gives it to a tier below: one row for each block."""
        return self.memory.view[: self.size].cast("B", shape=[self.count, self.block_bytes])

    def jobs(self) -> list[list[int]]:
        """Blocks in jobs, enough of them to keep every thread of a tier at work."""
        each = max(1, min(JOB_BLOCKS, self.count // JOBS_AT_LEAST))
        return [list(range(start, min(start + each, self.count))) for start in range(0, self.count, each)]


Jobs = Sequence[Sequence[int]]


def keys_of(job: Sequence[int], salt: int) -> list[bytes]:
    """As vLLM makes them: a hash and the number of a group of layers. Another salt, other keys."""
    return [hashlib.sha256(number.to_bytes(8, "big") + bytes([salt])).digest() + bytes(4) for number in job]


class Tier(Protocol):
    """What is measured. Both calls return the seconds until everything is done, and raise if anything failed."""

    def write(self, jobs: Jobs, salt: int) -> float: ...

    def read(self, jobs: Jobs, salt: int) -> float: ...

    def close(self) -> None: ...


class RawDisk:
    """The bare disk."""

    def __init__(self, folder: Path, load: Load) -> None:
        self._load = load
        self._queue = raw_disk.RawQueue()
        self._files = {salt: open_file(folder / f"raw{salt}", create_bytes=load.size) for salt in (WARM, MEASURED)}

    def write(self, jobs: Jobs, salt: int) -> float:
        return self._move(raw_disk.WRITE, jobs, salt)

    def read(self, jobs: Jobs, salt: int) -> float:
        return self._move(raw_disk.READ, jobs, salt)

    def _move(self, opcode: int, jobs: Jobs, salt: int) -> float:
        order = [number for job in jobs for number in job]
        fd = self._files[salt].acquire()
        seconds = self._queue.move(fd, opcode, self._load.memory, self._load.block_bytes, order)
        began = time.perf_counter()
        if opcode == raw_disk.WRITE:
            os.fdatasync(fd)
        self._files[salt].release()
        return seconds + time.perf_counter() - began

    def close(self) -> None:
        self._queue.close()
        for file in self._files.values():
            file.close()


class Store:
    """The SSD tier's store, with the defaults of the product."""

    def __init__(self, folder: Path, load: Load) -> None:
        self._load = load
        self._io = choose(IOBackend.AUTO, folder)
        self._store = SegmentStore(
            StoreConfig(
                root=folder / "store",
                name="benchmark",
                namespace=bytes(32),
                block_bytes=load.block_bytes,
                # Nothing is evicted, nothing refused because the disk is slow.
                budget_bytes=16 * max(load.size, GIB),
                floor_bytes=0,
                backlog_bytes=2 * load.size,
                put_wait_s=PATIENCE_S,
            ),
            self._io,
        )
        self._store.start()
        if not self._store.wait_recovered(PATIENCE_S):
            raise RuntimeError("the store does not start")

    def write(self, jobs: Jobs, salt: int) -> float:
        keys = [keys_of(job, salt) for job in jobs]
        began = time.perf_counter()
        self._run(self._store.put, jobs, keys)
        if not self._store.flush(PATIENCE_S):
            raise RuntimeError("the store does not get its blocks onto the disk")
        seconds = time.perf_counter() - began
        everything = [key for some in keys for key in some]
        if self._store.peek(everything) != len(everything):
            raise RuntimeError(f"the store lost blocks: {self._store.stats()}")
        return seconds

    def read(self, jobs: Jobs, salt: int) -> float:
        def get(ticket: int, keys: Sequence[bytes], targets: Rows) -> None:
            self._store.get(ticket, keys, targets, PATIENCE_S)

        keys = [keys_of(job, salt) for job in jobs]
        began = time.perf_counter()
        self._run(get, jobs, keys)
        return time.perf_counter() - began

    def _run(
        self,
        submit: Callable[[int, Sequence[bytes], Rows], None],
        jobs: Jobs,
        keys: Sequence[Sequence[bytes]],
    ) -> None:
        for ticket, job in enumerate(jobs):
            submit(ticket, keys[ticket], Rows(self._load.memory.view, job))
        left, deadline = len(jobs), time.monotonic() + PATIENCE_S
        while left:
            for finished in self._store.finished():
                if finished.failed:
                    raise RuntimeError(f"the store failed: {set(finished.failed.values())}")
                left -= 1
            _pause(deadline)

    def close(self) -> None:
        self._store.close(PATIENCE_S)
        self._io.close()


class FileTier:
    """vLLM's own."""

    def __init__(self, folder: Path, load: Load) -> None:
        self._folder = os.open(folder, os.O_RDONLY)
        # Here, as it takes seconds and the raw figures do not need it.
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        config = SimpleNamespace(
            groups=(),
            canonical_layout=False,
            replicated_layout=False,
            model=SimpleNamespace(name="benchmark", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=32),
            parallel=SimpleNamespace(
                rank=0, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=False
            ),
        )
        spec: Any = SimpleNamespace(
            config=config, blocks_per_chunk=1, kv_events_config=SimpleNamespace(enable_kv_cache_events=False)
        )
        self._tier: Any = FileSystemTierManager(spec, load.view, "fs", str(folder / "fs"))

    def write(self, jobs: Jobs, salt: int) -> float:
        seconds = self._run(self._tier.submit_store, jobs, salt, is_promotion=False)
        began = time.perf_counter()
        if _libc.syncfs(self._folder):
            raise OSError(ctypes.get_errno(), "syncfs")
        return seconds + time.perf_counter() - began

    def read(self, jobs: Jobs, salt: int) -> float:
        return self._run(self._tier.submit_load, jobs, salt, is_promotion=True)

    def _run(self, submit: Callable[[Any], None], jobs: Jobs, salt: int, *, is_promotion: bool) -> float:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        context = ReqContext(req_id="benchmark")
        keys: list[Any] = [keys_of(job, salt) for job in jobs]
        began = time.perf_counter()
        for number, job in enumerate(jobs):
            submit(TransferJob(number, keys[number], np.array(job), is_promotion, context))
        left, deadline = len(jobs), time.monotonic() + PATIENCE_S
        while left:
            for result in self._tier.get_finished_jobs():
                if not result.success:
                    raise RuntimeError("vLLM's file tier failed")
                left -= 1
            _pause(deadline)
        return time.perf_counter() - began

    def close(self) -> None:
        self._tier.shutdown()
        os.close(self._folder)


TIERS: dict[str, Callable[[Path, Load], Tier]] = {"raw": RawDisk, "store": Store, "vLLM fs": FileTier}


def _pause(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(f"a tier did not finish within {PATIENCE_S:g} s")
    time.sleep(POLL_S)
