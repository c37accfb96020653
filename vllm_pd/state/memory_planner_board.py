"""The planners' board in this process's memory; "the store" is a `MemoryStore`."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_pd.state.base import PoolId
from vllm_pd.state.keys import check_namespace
from vllm_pd.state.memory_store import MemoryPlanner, MemoryStore
from vllm_pd.state.planner_board import JOURNAL_LENGTH, JOURNAL_TTL_MS, MEMORY_TTL_MS, Leader


class MemoryPlannerBoard:
    """Implements `PlannerBoard` over a `MemoryStore`; never raises `StoreError`.

    Args:
        dry: for planners that only try out.
    """

    def __init__(self, namespace: str, store: MemoryStore | None = None, *, dry: bool = False) -> None:
        self._namespace = check_namespace(namespace)
        self._store = store or MemoryStore()
        self._dry = dry

    async def lead(self, pool: PoolId, planner: str, lease_ms: int) -> Leader:
        with self._store.lock:
            kept, now = self._of(pool), self._store.now_ms()
            if kept.ends <= now:
                kept.planner, kept.term, kept.ends = planner, max(kept.term + 1, int(now)), now + lease_ms
            elif kept.planner == planner:
                kept.ends = now + lease_ms
            return Leader(kept.planner, kept.term, int(kept.ends - now), int(now))

    async def leader(self, pool: PoolId) -> Leader | None:
        with self._store.lock:
            kept, now = self._of(pool), self._store.now_ms()
            if kept.ends <= now:
                return None
            return Leader(kept.planner, kept.term, int(kept.ends - now), int(now))

    async def resign(self, pool: PoolId, planner: str, term: int) -> bool:
        with self._store.lock:
            kept = self._of(pool)
            led = self._leads(kept, term) and kept.planner == planner
            if led:
                kept.ends = 0.0
            return led

    async def write(self, pool: PoolId, term: int, *, memory: bytes, newest: bytes, journal: Sequence[bytes]) -> bool:
        with self._store.lock:
            kept, now = self._of(pool), self._store.now_ms()
            if not self._leads(kept, term):
                return False
            kept.memory, kept.newest = (memory, now + MEMORY_TTL_MS), (newest, now + MEMORY_TTL_MS)
            kept.journal.extend((step, now + JOURNAL_TTL_MS) for step in journal)
            while len(kept.journal) > JOURNAL_LENGTH:
                kept.journal.popleft()
            return True

    async def memory(self, pool: PoolId) -> bytes | None:
        with self._store.lock:
            return self._fresh(self._of(pool).memory)

    async def newest(self, pool: PoolId) -> bytes | None:
        with self._store.lock:
            return self._fresh(self._of(pool).newest)

    async def journal(self, pool: PoolId, limit: int) -> Sequence[bytes]:
        with self._store.lock:
            now = self._store.now_ms()
            return [step for step, ends in self._of(pool).journal if ends > now][-limit:]

    async def pools(self) -> Sequence[PoolId]:
        with self._store.lock:
            planners, now = self._store.namespace(self._namespace).planners, self._store.now_ms()
            return sorted(
                pool
                for (pool, dry), kept in planners.items()
                if dry is self._dry and any(ends > now for _, ends in kept.journal)
            )

    async def close(self) -> None:
        return None

    def _of(self, pool: PoolId) -> MemoryPlanner:
        planners = self._store.namespace(self._namespace).planners
        return planners.setdefault((pool, self._dry), MemoryPlanner())

    def _leads(self, kept: MemoryPlanner, term: int) -> bool:
        return kept.term == term and kept.ends > self._store.now_ms()

    def _fresh(self, value: tuple[bytes, float] | None) -> bytes | None:
        return value[0] if value is not None and value[1] > self._store.now_ms() else None
