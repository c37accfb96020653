"""Wanted roles in this process's memory; "the store" is a `MemoryStore`."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_pd.state.base import Epoch, PoolId, WorkerId
from vllm_pd.state.keys import check_namespace
from vllm_pd.state.memory_store import MemoryStore
from vllm_pd.state.roles import WantedRole


class MemoryRoles:
    """Implements `Roles` over a `MemoryStore`; never raises `StoreError`."""

    def __init__(self, namespace: str, store: MemoryStore | None = None) -> None:
        self._namespace = check_namespace(namespace)
        self._store = store or MemoryStore()

    async def set(self, pool: PoolId, worker: WorkerId, wanted: WantedRole, ttl_ms: int) -> bool:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            stored = space.roles.get((pool, worker))
            if stored is not None and stored[0].epoch > wanted.epoch:
                return False
            space.roles[(pool, worker)] = (wanted, self._store.now_ms() + ttl_ms)
        return True

    async def get(self, pool: PoolId) -> Mapping[WorkerId, WantedRole]:
        with self._store.lock:
            roles = self._store.namespace(self._namespace).roles
            return {worker: wanted for (of, worker), (wanted, _) in roles.items() if of == pool}

    async def clear(self, pool: PoolId, worker: WorkerId, epoch: Epoch) -> bool:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            stored = space.roles.get((pool, worker))
            if stored is None or stored[0].epoch != epoch:
                return False
            del space.roles[(pool, worker)]
        return True

    async def close(self) -> None:
        return None
