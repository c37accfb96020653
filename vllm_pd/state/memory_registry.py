"""The registry in this process's memory. It keeps every rule of `base`; "the store" is a `MemoryStore`."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_pd.state.base import (
    Epoch,
    HeartbeatResult,
    PoolId,
    RegistrySnapshot,
    RouterWork,
    TokenizerFiles,
    WorkerId,
    WorkerLoad,
    WorkerRecord,
    WorkerState,
)
from vllm_pd.state.codec import assemble, by_worker, merge_loads
from vllm_pd.state.keys import check_namespace
from vllm_pd.state.memory_store import MemoryStore


class MemoryRegistry:
    """Implements `Registry` over a `MemoryStore`; never raises `StoreError`."""

    def __init__(self, namespace: str, store: MemoryStore | None = None) -> None:
        self._namespace = check_namespace(namespace)
        self._store = store or MemoryStore()

    async def heartbeat(self, record: WorkerRecord, lease_ms: int) -> HeartbeatResult:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            key = (record.pool.id, record.id)
            stored = space.workers.get(key)
            if stored is not None and stored[0].epoch > record.epoch:
                return HeartbeatResult.STALE
            renewed = stored is not None and stored[0].epoch == record.epoch
            if stored is not None and not renewed:
                space.loads.pop(key, None)
            space.workers[key] = (record, self._store.now_ms() + lease_ms)
        return HeartbeatResult.RENEWED if renewed else HeartbeatResult.NEW

    async def publish_load(
        self, worker: WorkerId, pool: PoolId, writer: int, loads: Mapping[int, WorkerLoad], ttl_ms: int
    ) -> None:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            entries = space.loads.setdefault((pool, worker), {})
            entries[writer] = (dict(loads), self._store.now_ms() + ttl_ms)

    async def publish_inflight(
        self, router_id: str, pool: PoolId, work: Mapping[WorkerId, RouterWork], ttl_ms: int
    ) -> None:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            space.inflight[(pool, router_id)] = (dict(work), self._store.now_ms() + ttl_ms)

    async def withdraw(self, worker: WorkerId, pool: PoolId, epoch: Epoch) -> bool:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            stored = space.workers.get((pool, worker))
            if stored is None or stored[0].epoch != epoch:
                return False
            del space.workers[(pool, worker)]
            space.loads.pop((pool, worker), None)
        return True

    async def snapshot(self) -> RegistrySnapshot:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            now = self._store.now_ms()
            works: dict[PoolId, list[tuple[str, dict[WorkerId, RouterWork]]]] = {}
            for (pool, router), (work, _) in space.inflight.items():
                works.setdefault(pool, []).append((router, work))
            others = {pool: by_worker(items) for pool, items in works.items()}
            return assemble(
                WorkerState(
                    record,
                    int(ends - now),
                    merge_loads(entry for entry, _ in space.loads.get(key, {}).values()),
                    others.get(key[0], {}).get(key[1], {}),
                )
                for key, (record, ends) in space.workers.items()
            )

    async def find(self, worker: WorkerId, pool: PoolId) -> WorkerState | None:
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            stored = space.workers.get((pool, worker))
            if stored is None:
                return None
            record, ends = stored
            loads = merge_loads(entry for entry, _ in space.loads.get((pool, worker), {}).values())
            return WorkerState(record, int(ends - self._store.now_ms()), loads)

    async def put_tokenizer(self, pool: PoolId, files: TokenizerFiles, ttl_ms: int) -> str:
        sha = files.sha
        with self._store.lock:
            space = self._store.namespace(self._namespace)
            space.tokenizers[(pool, sha)] = (files, self._store.now_ms() + ttl_ms)
        return sha

    async def get_tokenizer(self, pool: PoolId, sha: str) -> TokenizerFiles | None:
        with self._store.lock:
            stored = self._store.namespace(self._namespace).tokenizers.get((pool, sha))
        return stored[0] if stored is not None else None

    async def close(self) -> None:
        return None
