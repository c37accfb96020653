"""Tells the other routers of this store how much work this one has on each worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from vllm_pd.errors import StoreError
from vllm_pd.router.directory import Directory
from vllm_pd.state.base import PoolId, Registry, RouterWork, WorkerId

INTERVAL_S = 0.2
TTL_MS = 3000
"""Work of a router that died is forgotten after this long."""
RENEW_S = 1.0
DEADLINE_S = 1.0

_log = logging.getLogger(__name__)


class InflightPublisher:
    """Publishes when something changed, and now and then while there is work.

    Args:
        router: this router's id.
        clock: monotonic seconds.
    """

    def __init__(self, registry: Registry, directory: Directory, router: str, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._directory = directory
        self._router = router
        self._clock = clock
        self._last: dict[PoolId, tuple[dict[WorkerId, RouterWork], float]] = {}

    async def refresh(self) -> None:
        """Publish what is due. Never raises for a store that fails: others then see this router's work in the loads."""
        now = self._clock()
        pools = self._directory.pools
        self._last = {workers[0].pool: self._last.get(workers[0].pool, ({}, 0.0)) for workers in pools}
        for workers in pools:
            pool = workers[0].pool
            work = {
                worker.id: RouterWork(
                    sum(engine.own_prefill_tokens for engine in worker.engines),
                    sum(engine.queued for engine in worker.engines),
                )
                for worker in workers
                if any(engine.queued for engine in worker.engines)
            }
            last, at = self._last[pool]
            if work == last and (not work or now - at < RENEW_S):
                continue
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await self._registry.publish_inflight(self._router, pool, work, TTL_MS)
            except (StoreError, TimeoutError, OSError) as e:
                _log.debug("work in flight is not published: %s", e or "the store did not answer in time")
                return
            self._last[pool] = (work, now)
