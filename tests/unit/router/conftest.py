"""A router in this process on a real socket, with its workers in a memory registry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from tests.unit.router.fake_worker import FakeWorker
from vllm_pd.router import index_watch
from vllm_pd.router.service import RouterService
from vllm_pd.router.settings import RouterSettings
from vllm_pd.state import Epoch, PoolSpec, Role, WorkerId, WorkerLoad, WorkerRecord
from vllm_pd.state.memory_block_index import MemoryBlockIndex
from vllm_pd.state.memory_registry import MemoryRegistry
from vllm_pd.state.memory_store import MemoryStore

BLOCK = 32
SPEC = PoolSpec("m", "", "bf16", "auto", "nhd", BLOCK, "sha256_cbor", "0.32.0")
LONG = "word " * 200
WAIT_S = 60.0


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for `condition`, at most `WAIT_S`."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


def record(worker: FakeWorker, role: Role, *, spec: PoolSpec = SPEC, **changes: Any) -> WorkerRecord:
    """What `worker` would register."""
    values: dict[str, Any] = {
        "id": WorkerId(worker.host_port),
        "epoch": Epoch(1000),
        "pool": spec,
        "url": worker.url,
        "role": role,
        "models": worker.models,
        "nixl_host": "127.0.0.1",
        "nixl_port": 5600,
        "max_model_len": 2048,
    }
    return WorkerRecord(**{**values, **changes})


@dataclass
class Cluster:
    """A router, its fake workers and a client."""

    service: RouterService
    registry: MemoryRegistry
    index: MemoryBlockIndex
    client: aiohttp.ClientSession
    store: MemoryStore

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.port}"

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        async with self.client.post(self.url + path, data=data, headers=headers, **options) as answer:
            return answer.status, await answer.read()

    async def get(self, path: str, **options: Any) -> tuple[int, bytes]:
        async with self.client.get(self.url + path, **options) as answer:
            return answer.status, await answer.read()

    async def join(self, worker: FakeWorker, role: Role, **changes: Any) -> WorkerRecord:
        """Register and wait until the router knows it in this form."""
        entry = record(worker, role, **changes)
        await self.registry.heartbeat(entry, 60_000)
        watch = self.service.watch
        await until(
            lambda: (
                any(w.record == entry for w in self.service.directory.workers)
                and (watch is None or watch.mirror(entry.pool.id) is not None)
            ),
            f"{worker.host_port} joined",
        )
        return entry

    async def load(
        self, worker: FakeWorker, *, running: int = 0, waiting: int = 0, kv_usage: float = 0.0, at_ms: int = 1
    ) -> None:
        """Publish a load and wait until the router knows it."""
        await self.registry.publish_load(
            WorkerId(worker.host_port), SPEC.id, 0, {0: WorkerLoad(running, waiting, kv_usage, at_ms)}, 60_000
        )
        await until(
            lambda: any(
                w.id == worker.host_port and (w.running, w.waiting, w.kv_usage) == (running, waiting, kv_usage)
                for w in self.service.directory.workers
            ),
            "the load arrived",
        )

    def metric(self, name: str, **labels: str) -> float:
        value = self.service.metrics.registry.get_sample_value(f"vllm_pd_router_{name}", labels or None)
        return value or 0.0

    def inflight(self) -> int:
        return sum(worker.inflight for worker in self.service.directory.workers)


StartWorker = Callable[..., Awaitable[FakeWorker]]
StartCluster = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def start_worker() -> AsyncIterator[StartWorker]:
    started: list[FakeWorker] = []

    async def start(**options: Any) -> FakeWorker:
        worker = await FakeWorker(**options).start()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        await worker.stop()


@pytest.fixture
async def start_cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StartCluster]:
    # Between two reads the mirror looks whether workers have joined.
    monkeypatch.setattr(index_watch, "READ_WAIT_MS", 20)
    started: list[Cluster] = []

    async def start(**settings: Any) -> Cluster:
        store = settings.pop("shared", None) or MemoryStore()
        registry = MemoryRegistry("default", store)
        # Handing over between workers that are as idle as fakes is never worth it.
        values = replace(RouterSettings(), port=0, shutdown_grace=1.0, **{"disagg": "always", **settings})
        index = MemoryBlockIndex("default", store)
        service = RouterService(values, registry=registry, index=index, refresh_s=0.02)
        await service.start()
        client = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=WAIT_S))
        started.append(Cluster(service, registry, index, client, store))
        return started[-1]

    yield start
    for cluster in started:
        await cluster.client.close()
        await cluster.service.stop()


@dataclass
class PD:
    """One prefill and one decode worker behind a router."""

    cluster: Cluster
    prefill: FakeWorker
    decode: FakeWorker


@pytest.fixture
async def pd(start_cluster: StartCluster, start_worker: StartWorker) -> PD:
    cluster = await start_cluster()
    prefill, decode = await start_worker(), await start_worker()
    await cluster.join(prefill, Role.PREFILL)
    await cluster.join(decode, Role.DECODE)
    return PD(cluster, prefill, decode)
