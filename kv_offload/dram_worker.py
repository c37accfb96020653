"""Copies KV blocks between vLLM's KV cache and the DRAM tier on the CPU platform, where both sides are host memory.

vLLM's own worker does this with CUDA streams and refuses the CPU platform. This one keeps its contract with a thread
per lane, so that a load never queues behind stores nor one that a step waits for behind those that nobody waits for;
jobs of one lane run in the order of submission. A request waits for a load, so a large one is copied on several cores;
nobody waits for a store, which takes one core from the model at most.

When may a store read its blocks? vLLM submits a store at the start of the step after the one that computed the KV
(`OffloadingConnectorWorker` parks it in `_unsubmitted_store_jobs`), and on the CPU platform a step has finished writing
when it returns, so every byte is there at submission. Afterwards, while the copy runs beside the next steps, nothing
writes to these blocks until the scheduler gives them to somebody else:
  - only chunks whose blocks are completely filled are stored, and a filled block is not written again while its
    request holds it (the block being filled is never part of a job; the partial tails that hybrid models store are
    copies that nobody else writes, and the scheduler fences them from the start);
  - a block that is freed (request finished) or may be freed early (sliding window) is remembered with its pending
    jobs, and allocating it again, to compute in or to load into, puts those jobs into `jobs_to_flush`;
  - a preempted request's jobs are all put into `jobs_to_flush`, and so are all jobs when the cache is reset.
The worker gets `jobs_to_flush` in `handle_preemptions`, before the step zeroes, loads or computes anything, and calls
`wait`: that is the fence, and it returns only when those copies are complete.

A tier slot needs no fence of its own: the scheduler frees it only after its last job was reported by `get_finished`.

Failures: vLLM stops the engine when a transfer is reported as failed, and a transfer reported as done must be done.
Everything that can be wrong about a job is therefore checked at submission (as vLLM's worker asserts there), and what
remains for the thread is a loop over checked addresses, which has no error of its own. If it raises all the same, the
copy is repeated in the calling thread before anything is reported; only if that fails too is the job reported as
failed and does the engine stop, rather than answer from wrong KV.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from vllm_pd.errors import PDError
from vllm_pd.kv_offload import byte_copy
from vllm_pd.kv_offload.copy_plan import CopyPlan, Ref, Side, TensorPair, TierLayout, plan_load, plan_store
from vllm_pd.kv_offload.tier_memory import tier_memory
from vllm_pd.vllm_compat import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    SharedOffloadRegion,
    TransferResult,
)

logger = logging.getLogger(f"vllm.{__name__}")

FENCE_DEADLINE_S = 120.0
"""A fence that takes longer means a copying thread is stuck: going on would let the model overwrite its source."""


@dataclass(slots=True)
class Job:
    """One transfer on its way. `error`, `seconds` are valid once `done` is set."""

    id: int
    plan: CopyPlan
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    seconds: float = 0.0


class Lane:
    """A queue, a thread that works it off in order, and the jobs not yet reported."""

    def __init__(self, name: str, copy: Callable[[CopyPlan], None], cores: frozenset[int]) -> None:
        self._copy = copy
        self._cores = cores
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._unreported: deque[Job] = deque()
        self._thread = threading.Thread(target=self._work, name=f"vllm_pd_{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._unreported.append(job)
        self._queue.put(job)

    def finished(self) -> list[TransferResult]:
        """Results, in order, of the jobs that were completed since the last call."""
        results = []
        while self._unreported and self._unreported[0].done.is_set():
            job = self._unreported.popleft()
            self._settle(job)
            results.append(
                TransferResult(
                    job_id=job.id,
                    success=job.error is None,
                    transfer_size=job.plan.total_bytes,
                    transfer_time=job.seconds,
                )
            )
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Return when the named jobs are complete; ids that are unknown or already reported are ignored."""
        deadline = time.monotonic() + FENCE_DEADLINE_S
        for job in self._unreported:
            if job.id not in job_ids:
                continue
            if not job.done.wait(max(0.0, deadline - time.monotonic())):
                raise PDError(
                    f"A KV copy of {job.plan.total_bytes} bytes did not end within {FENCE_DEADLINE_S:.0f} s; the host "
                    "is out of CPU or memory, so the engine stops rather than overwrite blocks that are being read."
                )
            self._settle(job)

    def stop(self, timeout_s: float) -> bool:
        """Finish what was submitted and end the thread. Returns whether it ended in time. Idempotent."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        byte_copy.run_on(self._cores)
        while (job := self._queue.get()) is not None:
            self._attempt(job)
            job.done.set()

    def _attempt(self, job: Job) -> None:
        started = time.perf_counter()
        try:
            self._copy(job.plan)
            job.error = None
        except Exception as e:
            job.error = e
        job.seconds += time.perf_counter() - started

    def _settle(self, job: Job) -> None:
        """Repeat a copy that failed in the thread; the caller must not go on before it is complete."""
        if job.error is None:
            return
        logger.warning("KV copy job %d failed in its thread (%r); repeating it now.", job.id, job.error)
        self._attempt(job)
        if job.error is not None:
            logger.error("KV copy job %d failed twice (%r); the engine cannot go on.", job.id, job.error)


SHUTDOWN_DEADLINE_S = 30.0


class DramOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """vLLM's `OffloadingWorker` for a KV cache in host memory.

    Args:
        kv_caches: vLLM's tensors, one row per block, and which layer of which group uses what of them.
        blocks_per_chunk: blocks in one slot of the tier.
        num_chunks: slots of the tier.
        region: shared memory to use as the tier, which this worker then owns; None allocates private memory, whose
            pages the kernel provides when they are first written.
        copy: replaced by tests.

    Raises:
        ValueError: the KV cache has a shape that this worker cannot copy.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        num_chunks: int,
        region: SharedOffloadRegion | None = None,
        copy: Callable[[CopyPlan], None] | None = None,
    ) -> None:
        self._region = region
        # Raw addresses are handed to the threads, so the tensors must live until the threads have ended.
        self._tensors: list[torch.Tensor] = []
        self._layout = self._build_layout(kv_caches, blocks_per_chunk, num_chunks)
        byte_copy.compiled()
        cores = byte_copy.cores_of_process()
        self._parallel = byte_copy.ParallelCopy(cores)
        self._stores = Lane("kv_store", copy or byte_copy.copy, cores)
        self._loads = Lane("kv_load", copy or self._parallel, cores)
        self._expedited = Lane("kv_load_now", copy or self._parallel, cores)
        self._lanes = (self._stores, self._loads, self._expedited)
        # Also runs when the interpreter exits without shutdown(): memory must not go while a thread copies.
        self._stop = weakref.finalize(self, _stop_lanes, self._lanes, self._parallel)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Start copying blocks to chunks. Raises ValueError for a job that does not fit the cache."""
        self._stores.submit(Job(job_id, self._plan(plan_store, src_spec, dst_spec)))
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Start copying chunks to blocks; vLLM 0.33 sets `expedited` when the step waits for it.

        Raises:
            ValueError: the job does not fit the cache.
        """
        lane = self._expedited if expedited else self._loads
        lane.submit(Job(job_id, self._plan(plan_load, dst_spec, src_spec)))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs completed since the last call, in order of submission within each lane."""
        return [result for lane in self._lanes for result in lane.finished()]

    def wait(self, job_ids: set[int]) -> None:
        """The fence: return when these jobs are complete. Raises PDError after `FENCE_DEADLINE_S`."""
        for lane in self._lanes:
            lane.wait(job_ids)

    def shutdown(self) -> None:
        """Complete what was submitted, end the threads, release the tier's memory. Idempotent."""
        stopped = self._stop()
        if stopped is False:
            logger.error("A KV copy did not end within %.0f s; its memory is not released.", SHUTDOWN_DEADLINE_S)
            return
        self._tensors.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _plan(self, plan: Callable[..., CopyPlan], block_spec: Any, chunk_spec: Any) -> CopyPlan:
        return plan(
            self._layout, block_spec.block_ids, chunk_spec.block_ids, block_spec.group_sizes, block_spec.block_indices
        )

    def _build_layout(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, num_chunks: int) -> TierLayout:
        pairs = []
        for cache in kv_caches.tensors:
            # The same view that vLLM's worker takes: bytes, one row per block, rows possibly further apart.
            blocks = cache.tensor.view(torch.int8).view((-1, cache.page_size_bytes))
            if blocks.device.type != "cpu":
                raise ValueError(f"the KV cache is on {blocks.device}, but the DRAM worker copies host memory only")
            row_bytes = cache.page_size_bytes * blocks_per_chunk
            if self._region is not None:
                chunks = self._region.create_next_worker_view(row_bytes)
            else:
                chunks = tier_memory(num_chunks, row_bytes)
            self._tensors += (blocks, chunks)
            pairs.append(TensorPair(_side(blocks), _side(chunks), cache.page_size_bytes))
        groups = tuple(
            tuple(Ref(ref.tensor_idx, ref.page_size_bytes) for ref in refs) for refs in kv_caches.group_data_refs
        )
        return TierLayout(tuple(pairs), groups, blocks_per_chunk)


def _side(tensor: torch.Tensor) -> Side:
    if tensor.stride(1) != 1:
        raise ValueError(f"a KV cache row is not contiguous: strides {tensor.stride()}")
    return Side(tensor.data_ptr(), tensor.stride(0), tensor.shape[0])


def _stop_lanes(lanes: Sequence[Lane], parallel: byte_copy.ParallelCopy) -> bool:
    # All are told to stop even if one of them hangs.
    ended = [lane.stop(SHUTDOWN_DEADLINE_S) for lane in lanes]
    parallel.stop()
    return all(ended)
