"""The registry in this process's memory: for one-process set-ups, simulations and tests.

It keeps every rule of `base`; "the store" is a `MemoryStore` that several registries of one process may share, also
from different threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_pd.state.base import (
    Epoch,
    HeartbeatResult,
    PoolId,
    RegistrySnapshot,
    TokenizerFiles,
    WorkerId,
    WorkerLoad,
    WorkerRecord,
    WorkerState,
)
from vllm_pd.state.codec import assemble, merge_loads
from vllm_pd.state.keys import check_namespace


@dataclass(slots=True)
class _Namespace:
    """Values with the time (ms of the store's clock) at which each ends."""

    workers: dict[tuple[PoolId, WorkerId], tuple[WorkerRecord, float]] = field(default_factory=dict)
    loads: dict[tuple[PoolId, WorkerId], dict[int, tuple[dict[int, WorkerLoad], float]]] = field(default_factory=dict)
    tokenizers: dict[tuple[PoolId, str], tuple[TokenizerFiles, float]] = field(default_factory=dict)

    def drop_ended(self, now: float) -> None:
        self.workers = {key: value for key, value in self.workers.items() if value[1] > now}
        self.tokenizers = {key: value for key, value in self.tokenizers.items() if value[1] > now}
        fresh = {
            key: {writer: entry for writer, entry in entries.items() if entry[1] > now}
            for key, entries in self.loads.items()
        }
        self.loads = {key: entries for key, entries in fresh.items() if entries}


class MemoryStore:
    """What a Redis server is to `RedisRegistry`. Thread-safe.

    Args:
        clock: seconds, never going back; tests inject their own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._namespaces: dict[str, _Namespace] = {}
        self.lock = threading.Lock()

    def now_ms(self) -> float:
        return self._clock() * 1000

    def namespace(self, name: str) -> _Namespace:
        """Call with `lock` held; everything that has ended is already gone."""
        space = self._namespaces.setdefault(name, _Namespace())
        space.drop_ended(self.now_ms())
        return space

    def clear(self) -> None:
        """Forget everything, as a restart of the store would."""
        with self.lock:
            self._namespaces.clear()


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
            return assemble(
                WorkerState(
                    record,
                    int(ends - now),
                    merge_loads(entry for entry, _ in space.loads.get(key, {}).values()),
                )
                for key, (record, ends) in space.workers.items()
            )

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
