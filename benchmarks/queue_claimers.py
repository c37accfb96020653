"""Workers that do nothing but claim jobs and acknowledge them, for `queue_rate`.

Run as `python -m benchmarks.queue_claimers STORE NAMESPACE POOL COUNT`.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from vllm_pd.state import Claimant, Epoch, PoolId, WorkerId, open_prefill_queue

RESULT = b"x" * 2000
"""About what the hand-off parameters of a prompt of some thousand tokens take."""


async def work(store: str, namespace: str, pool: PoolId, count: int) -> None:
    """Until the process is ended."""
    queue = open_prefill_queue(store, namespace, timeout_s=10.0)

    async def one(claimant: Claimant) -> None:
        while True:
            claim = await queue.claim(pool, claimant, fits=-1, wait_ms=1000)
            if claim is not None:
                await queue.ack(pool, claim, RESULT)

    await asyncio.gather(*(one(Claimant(WorkerId(f"worker:{n}"), Epoch(1))) for n in range(count)))


if __name__ == "__main__":
    uvloop.run(work(sys.argv[1], sys.argv[2], PoolId(sys.argv[3]), int(sys.argv[4])))
