"""How long until others have the jobs of a prefill worker that was killed (SIGKILL), and what their clients see.

Two prefill workers, processes of their own, share a burst of long prompts; one of them is killed while it has some.
Either it stays dead, or it is started again at once, at the same address. The same burst without a kill is beside it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.common import progress
from benchmarks.load import LoadError, run_load
from benchmarks.mock_cluster import MockCluster, new_prompt
from vllm_pd.graph.process import ManagedProcess
from vllm_pd.state import JobInfo, PoolId, PrefillQueue, open_prefill_queue, open_registry

TOKENS = 4000
SPEED = "0.1"
"""A prompt takes the modelled engine about a second."""
REQUESTS = 10
KILL_AFTER_S = 0.5
"""At least: a worker without jobs is not killed."""
TRIES = 3
"""Bursts, for one in which the worker gets jobs: on a busy machine all may go past the queue."""
LOOK_S = 0.02
DEADLINE_S = 90.0
NAMESPACE = "default"


@dataclass(slots=True)
class _Seen:
    """What was seen of one burst."""

    started: float = 0.0
    killed: float = 0.0
    had: int = 0
    """Jobs in the hands of the worker that was killed."""
    given_on: float = 0.0
    """When the last of them was out of its hands."""
    first: list[float] = field(default_factory=list)
    """When each request had its first token."""
    failed: list[str] = field(default_factory=list)


def measure() -> list[dict[str, Any]]:
    """A row for the burst without a kill, with one, and with one and a restart.

    Raises:
        ProcessError, StoreError, TimeoutError: something did not start or answer.
        RuntimeError: the worker that was to be killed had no jobs.
    """
    rows = []
    with MockCluster() as cluster:
        cluster.worker("decode", "--speed", SPEED)
        workers = [worker.process for worker in cluster.start_workers(("prefill", "prefill"), "--speed", SPEED)]
        port = cluster.router("--disagg", "always", "--prefill-dispatch", "queue").port
        chance = random.Random(5)
        uvloop.run(_first_token(port, new_prompt(chance, 100), []))
        for case in ("no kill", "killed, started again at once", "killed, stays dead"):
            progress(f"recovery: {REQUESTS} prompts of {TOKENS} tokens, {case}")
            victim = workers[0] if case != "no kill" else None
            for _ in range(TRIES):
                bodies = [new_prompt(chance, TOKENS) for _ in range(REQUESTS)]
                seen = uvloop.run(_burst(cluster.store.url, port, bodies, victim, restart="again" in case))
                if victim is None or seen.had:
                    break
            else:
                raise RuntimeError("the prefill worker that was to be killed had no jobs: the store is too slow")
            rows.append(_row(case, seen))
    return rows


async def _burst(
    url: str, port: int, bodies: Sequence[bytes], victim: ManagedProcess | None, *, restart: bool
) -> _Seen:
    registry = open_registry(url, NAMESPACE, timeout_s=5.0)
    queue = open_prefill_queue(url, NAMESPACE, timeout_s=5.0)
    try:
        pool = (await registry.snapshot()).workers[0].record.pool.id
        async with asyncio.timeout(DEADLINE_S):
            return await _watch(queue, pool, port, bodies, victim, restart=restart)
    finally:
        await queue.close()
        await registry.close()


async def _watch(
    queue: PrefillQueue,
    pool: PoolId,
    port: int,
    bodies: Sequence[bytes],
    victim: ManagedProcess | None,
    *,
    restart: bool,
) -> _Seen:
    seen = _Seen(started=time.perf_counter())
    asking = [asyncio.create_task(_first_token(port, body, seen.failed)) for body in bodies]
    await asyncio.sleep(KILL_AFTER_S)
    if victim is not None:
        # Its port is its name in the store.
        name = victim.spec.name.rpartition("-")[2]
        while not (own := [job for job in await queue.jobs(pool) if _worker_port(job) == name]):
            if all(task.done() for task in asking):
                return seen
            await asyncio.sleep(LOOK_S)
        # What it was given after the look is not counted.
        held = {job.id: job.claimant for job in own}
        victim.kill()
        seen.killed, seen.had = time.perf_counter(), len(held)
        if restart:
            victim.start()
        while held:
            now = {job.id: job.claimant for job in await queue.jobs(pool)}
            held = {job: claimant for job, claimant in held.items() if now.get(job) == claimant}
            await asyncio.sleep(LOOK_S)
        seen.given_on = time.perf_counter()
    seen.first = [first for first in await asyncio.gather(*asking) if first is not None]
    return seen


async def _first_token(port: int, body: bytes, failed: list[str]) -> float | None:
    try:
        began = time.perf_counter()
        return began + (await run_load(port, body, requests=1, connections=1)).first_byte[0]
    except LoadError as e:
        failed.append(str(e))
        return None


def _worker_port(job: JobInfo) -> str:
    return job.claimant.partition("@")[0].rpartition(":")[2]


def _row(case: str, seen: _Seen) -> dict[str, Any]:
    return {
        "prefill worker": case,
        "requests": REQUESTS,
        "failed": len(seen.failed),
        "jobs it had": seen.had or None,
        "given to others after s": seen.given_on - seen.killed if seen.killed else None,
        "slowest TTFT s": max(seen.first) - seen.started if seen.first else None,
    }
