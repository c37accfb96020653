"""How many jobs go through the store in a second: put by one process, claimed and done by another, results read.

Nothing is computed. What bounds it is the CPU of three processes: whoever puts, the store, whoever claims.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import uvloop

from benchmarks.common import cpu_seconds, progress
from benchmarks.mock_cluster import MockCluster
from vllm_pd.state import JobId, PoolId, PrefillJob, PrefillQueue, QueueLimits, open_prefill_queue

POOL = PoolId("0" * 16)
ROUTER = "benchmark"
NAMESPACE = "queue-rate"
PAYLOAD = b"x" * 8000
"""A chat of some thousand tokens."""
WORKERS = 8
DEADLINE_S = 120.0


def measure(jobs: int, depths: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for each number of jobs that are in the queue at a time.

    Raises:
        ProcessError, StoreError, TimeoutError: something did not start or answer.
    """
    with MockCluster() as cluster:
        command = [sys.executable, "-m", "benchmarks.queue_claimers", cluster.store.url, NAMESPACE, POOL, str(WORKERS)]
        claimers = cluster.run("claimers", command)
        rows = []
        for depth in depths:
            progress(f"jobs/s: {jobs} jobs, {depth} at a time")
            rows.append(uvloop.run(_round(cluster.store.url, claimers.pid, jobs, depth)))
    return rows


async def _round(url: str, claimers: int, jobs: int, depth: int) -> dict[str, Any]:
    queue = open_prefill_queue(url, NAMESPACE, limits=QueueLimits(length=10_000), timeout_s=10.0)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await _through(queue, f"warm-up-{depth}", 100, depth)
            before, began = cpu_seconds(claimers), time.perf_counter()
            own = time.process_time()
            await _through(queue, f"job-{depth}", jobs, depth)
            took = time.perf_counter() - began
    finally:
        await queue.close()
    return {
        "jobs in the queue": depth,
        "jobs": jobs,
        "jobs/s": jobs / took,
        "CPU us/job, put and results": (time.process_time() - own) / jobs * 1e6,
        "CPU us/job, claim and ack": (cpu_seconds(claimers) - before) / jobs * 1e6,
    }


async def _through(queue: PrefillQueue, name: str, jobs: int, depth: int) -> None:
    """Put jobs, at most `depth` at a time, and read all their results."""
    room = asyncio.Semaphore(depth)
    left = {JobId(f"{name}-{n}") for n in range(jobs)}

    async def results() -> None:
        while left:
            for job, _ in await queue.results(POOL, ROUTER, 1000):
                if job in left:
                    left.discard(job)
                    room.release()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(results())
        for order, job in enumerate(sorted(left)):
            await room.acquire()
            tasks.create_task(queue.put(POOL, PrefillJob(job, 1000, PAYLOAD, None, order, ROUTER), 60_000))
