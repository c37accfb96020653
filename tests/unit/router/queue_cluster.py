"""A router on a real store whose prefill workers claim from its queue, each by the agent's own runner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import aiohttp

from tests.unit.router.conftest import LONG, SPEC, WAIT_S, record, until
from tests.unit.router.fake_worker import FakeWorker
from vllm_pd.agent.prefill_progress import EngineProgress
from vllm_pd.agent.prefill_runner import PrefillRunner
from vllm_pd.agent.readiness import OwnServer
from vllm_pd.agent.spec import PrefillSpec
from vllm_pd.background import end_tasks
from vllm_pd.errors import StoreError
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.holds import RELEASE_FIELD
from vllm_pd.router.service import RouterService
from vllm_pd.router.settings import RouterSettings
from vllm_pd.state import Registry, Role, WorkerRecord
from vllm_pd.state.open_registry import open_block_index, open_registry
from vllm_pd.state.prefill_queue import JobInfo, QueueLimits
from vllm_pd.state.redis_prefill_queue import RedisPrefillQueue

PATH = "/v1/completions"
BODY = {"prompt": LONG, "max_tokens": 20}
POOL = SPEC.id


class Member:
    """A worker: registered for as long as it beats."""

    def __init__(self, worker: FakeWorker, entry: WorkerRecord, registry: Registry, lease_ms: int) -> None:
        self.worker = worker
        self.entry = entry
        self.runner: PrefillRunner | None = None
        self._registry = registry
        self._lease_ms = lease_ms
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            with suppress(StoreError):
                await self._registry.heartbeat(self.entry, self._lease_ms)
            await asyncio.sleep(0.1)

    async def die(self) -> None:
        """No sign of life any more; what it has claimed and its lease are left to end."""
        await end_tasks([self._beating])
        if self.runner is not None:
            await self.runner.close()

    async def withdraw(self) -> None:
        """As a worker that is being stopped: it finishes what it has."""
        await end_tasks([self._beating])
        if self.runner is not None:
            self.runner.leave()
        await self._registry.withdraw(self.entry.id, POOL, self.entry.epoch)

    @property
    def legs(self) -> list[Any]:
        """What it was asked to prefill."""
        return [seen for seen in self.worker.posts if "do_remote_decode" in (seen.json.get("kv_transfer_params") or {})]

    @property
    def released(self) -> list[str]:
        """Keys of the blocks that it was told to let go."""
        told = [seen.json.get("kv_transfer_params") or {} for seen in self.worker.posts]
        return [key for params in told for key in params.get(RELEASE_FIELD, [])]


class QueueCluster:
    """Everything in one process but the store."""

    def __init__(self, store: EmbeddedStore, service: RouterService, limits: QueueLimits, stack: AsyncExitStack):
        self.store = store
        self.service = service
        self.limits = limits
        self.registry = open_registry(store.url, "default", timeout_s=5.0)
        self.index = open_block_index(store.url, "default", timeout_s=5.0)
        self.queue = self.open_queue()
        self.client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S))
        self._members: list[Member] = []
        self._stack = stack

    def open_queue(self) -> RedisPrefillQueue:
        return RedisPrefillQueue(self.store.url, "default", limits=self.limits, timeout_s=5.0)

    async def join(
        self, role: Role, *, runs: bool = True, lease_ms: int = 60_000, api_key: str = "", **changes: Any
    ) -> Member:
        """A worker that the router knows; one that prefills claims, unless `runs` is false."""
        worker = await FakeWorker(api_key=api_key).start()
        self._stack.push_async_callback(worker.stop)
        entry = record(worker, role, **{"claims": role.prefills, **changes})
        member = Member(worker, entry, self.registry, lease_ms)
        self._members.append(member)
        if role.prefills and runs:
            spec = PrefillSpec(
                open_queue=self.open_queue,
                server=OwnServer(port=worker.port),
                api_key=api_key,
                budget_tokens=1000,
            )
            queue = self.open_queue()
            self._stack.push_async_callback(queue.close)
            member.runner = PrefillRunner(entry, spec, queue, EngineProgress(known=False), self.limits)
            member.runner.start()
            member.runner.allow(True)
        await until(lambda: self.service.directory.get(entry.id) is not None, "the worker joined")
        if entry.claims:
            await until(lambda: self.is_up and entry.id in self.watched.claimers, "the queue is in use")
        return member

    @property
    def watched(self) -> Any:
        assert self.service.queues is not None
        (queue,) = self.service.queues.pools
        return queue

    @property
    def is_up(self) -> bool:
        return any(queue.up for queue in self.service.queues.pools) if self.service.queues is not None else False

    async def post(self, body: Any = None, **options: Any) -> tuple[int, bytes, dict[str, str]]:
        url = f"http://127.0.0.1:{self.service.port}{PATH}"
        async with self.client.post(url, data=json.dumps(body or BODY), **options) as answer:
            return answer.status, await answer.read(), dict(answer.headers)

    def metric(self, name: str, **labels: str) -> float:
        return self.service.metrics.registry.get_sample_value(f"vllm_pd_router_{name}", labels or None) or 0.0

    async def jobs(self) -> list[JobInfo]:
        return list(await self.queue.jobs(POOL))

    async def queued(self, count: int = 1) -> list[JobInfo]:
        """Wait until so many jobs are in the queue."""
        async with asyncio.timeout(WAIT_S):
            while len(found := await self.jobs()) != count:  # noqa: ASYNC110 - the store has no event for it
                await asyncio.sleep(0.01)
        return found

    async def close(self) -> None:
        for member in self._members:
            await member.die()
        await self.client.close()
        for each in (self.queue, self.index, self.registry):
            await each.close()


@asynccontextmanager
async def queue_cluster(
    store: EmbeddedStore, *, limits: QueueLimits | None = None, **settings: Any
) -> AsyncIterator[QueueCluster]:
    """A router alone; `settings` are its own."""
    limits = limits or QueueLimits(visibility_ms=60_000, patience_ms=0)
    values = replace(RouterSettings(), port=0, shutdown_grace=1.0, disagg="always", **settings)
    service = RouterService(
        values,
        registry=open_registry(store.url, "default", timeout_s=1.0),
        index=open_block_index(store.url, "default", timeout_s=1.0),
        queue=RedisPrefillQueue(store.url, "default", limits=limits, timeout_s=1.0),
        refresh_s=0.05,
    )
    async with AsyncExitStack() as stack:
        await service.start()
        stack.push_async_callback(service.stop)
        cluster = QueueCluster(store, service, limits, stack)
        stack.push_async_callback(cluster.close)
        yield cluster
