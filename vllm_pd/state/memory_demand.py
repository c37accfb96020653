"""Demand reports in this process's memory; "the store" is a `MemoryStore`."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_pd.state.base import PoolId
from vllm_pd.state.demand import DemandReport
from vllm_pd.state.keys import check_namespace
from vllm_pd.state.memory_store import MemoryStore


class MemoryDemandBoard:
    """Implements `DemandBoard` over a `MemoryStore`; never raises `StoreError`."""

    def __init__(self, namespace: str, store: MemoryStore | None = None) -> None:
        self._namespace = check_namespace(namespace)
        self._store = store or MemoryStore()

    async def publish(self, pool: PoolId, router: str, report: DemandReport, ttl_ms: int) -> None:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            space.demand[(pool, router)] = (report, self._store.now_ms() + ttl_ms)

    async def read(self, pool: PoolId) -> Mapping[str, DemandReport]:
        with self._store.lock:
            demand = self._store.namespace(self._namespace).demand
            return {router: report for (of, router), (report, _) in sorted(demand.items()) if of == pool}

    async def close(self) -> None:
        return None
