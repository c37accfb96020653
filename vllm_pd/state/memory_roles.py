"""Wanted roles in this process's memory; "the store" is a `MemoryStore`."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_pd.state.base import Epoch, PoolId, Role, WorkerId
from vllm_pd.state.keys import check_namespace
from vllm_pd.state.memory_store import MemoryStore, Namespace
from vllm_pd.state.roles import AWAY_FROM, Stays, WantedRole, Wished


class MemoryRoles:
    """Implements `Roles` over a `MemoryStore`; never raises `StoreError`."""

    def __init__(self, namespace: str, store: MemoryStore | None = None) -> None:
        self._namespace = check_namespace(namespace)
        self._store = store or MemoryStore()

    async def set(self, pool: PoolId, worker: WorkerId, wanted: WantedRole, ttl_ms: int) -> bool:
        return await self.set_unless_last(pool, worker, wanted, ttl_ms, {}) is Wished.WISHED

    async def set_unless_last(
        self,
        pool: PoolId,
        worker: WorkerId,
        wanted: WantedRole,
        ttl_ms: int,
        stays: Stays,
        *,
        term: int | None = None,
    ) -> Wished:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            stored = space.roles.get((pool, worker))
            if stored is not None and stored[0].epoch > wanted.epoch:
                return Wished.OLD
            if term is not None:
                leads = space.planners.get((pool, False))
                if leads is not None and leads.term > term:
                    return Wished.DEPOSED
                if stored is not None and stored[0].epoch == wanted.epoch and stored[0].by not in ("", wanted.by):
                    return Wished.HELD
            for kind, members in stays.items():
                if all(_is_away(space, pool, *member, kind) for member in members):
                    return Wished.LAST
            space.roles[(pool, worker)] = (wanted, self._store.now_ms() + ttl_ms)
        return Wished.WISHED

    async def get(self, pool: PoolId) -> Mapping[WorkerId, WantedRole]:
        with self._store.lock:
            roles = self._store.namespace(self._namespace).roles
            return {worker: wanted for (of, worker), (wanted, _) in roles.items() if of == pool}

    async def of(self, pool: PoolId, worker: WorkerId) -> WantedRole | None:
        with self._store.lock:
            stored = self._store.namespace(self._namespace).roles.get((pool, worker))
        return stored[0] if stored is not None else None

    async def clear(self, pool: PoolId, worker: WorkerId, epoch: Epoch, id: str = "") -> bool:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            stored = space.roles.get((pool, worker))
            if stored is None or stored[0].epoch != epoch or (id and stored[0].id != id):
                return False
            del space.roles[(pool, worker)]
        return True

    async def close(self) -> None:
        return None


def _is_away(space: Namespace, pool: PoolId, worker: WorkerId, epoch: Epoch, kind: Role) -> bool:
    """Whether a wish takes this start of the worker away from this kind of work."""
    stored = space.roles.get((pool, worker))
    return stored is not None and stored[0].epoch >= epoch and stored[0].role is AWAY_FROM[kind]
