"""The stores that every conformance suite runs on, by name: memory and each way to run a server."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.conformance import deployments
from tests.conformance.deployments import Deployment
from vllm_pd.state import (
    BlockIndex,
    MemoryBlockIndex,
    MemoryPrefillQueue,
    MemoryRegistry,
    MemoryRoles,
    MemoryStore,
    PrefillQueue,
    QueueLimits,
    Registry,
    Roles,
)
from vllm_pd.state.demand import DemandBoard
from vllm_pd.state.memory_demand import MemoryDemandBoard
from vllm_pd.state.memory_planner_board import MemoryPlannerBoard
from vllm_pd.state.planner_board import PlannerBoard
from vllm_pd.state.redis_block_index import RedisBlockIndex
from vllm_pd.state.redis_demand import RedisDemandBoard
from vllm_pd.state.redis_planner_board import RedisPlannerBoard
from vllm_pd.state.redis_prefill_queue import RedisPrefillQueue
from vllm_pd.state.redis_registry import RedisRegistry
from vllm_pd.state.redis_roles import RedisRoles

TIMEOUT_S = 10.0


class MemoryHarness:
    """The clock moves only when a test says so."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._store = MemoryStore(clock=lambda: self._now)

    def registry(self, namespace: str = "test") -> Registry:
        return MemoryRegistry(namespace, self._store)

    def block_index(self, namespace: str = "test") -> BlockIndex:
        return MemoryBlockIndex(namespace, self._store)

    def roles(self, namespace: str = "test") -> Roles:
        return MemoryRoles(namespace, self._store)

    def prefill_queue(self, limits: QueueLimits, namespace: str = "test") -> PrefillQueue:
        return MemoryPrefillQueue(namespace, self._store, limits=limits)

    def demand(self, namespace: str = "test") -> DemandBoard:
        return MemoryDemandBoard(namespace, self._store)

    def planner_board(self, namespace: str = "test", *, dry: bool = False) -> PlannerBoard:
        return MemoryPlannerBoard(namespace, self._store, dry=dry)

    async def pass_time(self, ms: int) -> None:
        self._now += ms / 1000

    async def lose_everything(self) -> None:
        self._store.clear()

    async def close(self) -> None:
        return None


class RedisHarness:
    """A server's clock is the real one."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._url = deployment.url
        self._open: list[Any] = []

    def registry(self, namespace: str = "test") -> Registry:
        return self._opened(RedisRegistry(self._url, namespace, timeout_s=TIMEOUT_S))

    def block_index(self, namespace: str = "test") -> BlockIndex:
        return self._opened(RedisBlockIndex(self._url, namespace, timeout_s=TIMEOUT_S))

    def roles(self, namespace: str = "test") -> Roles:
        return self._opened(RedisRoles(self._url, namespace, timeout_s=TIMEOUT_S))

    def prefill_queue(self, limits: QueueLimits, namespace: str = "test") -> PrefillQueue:
        return self._opened(RedisPrefillQueue(self._url, namespace, limits=limits, timeout_s=TIMEOUT_S))

    def demand(self, namespace: str = "test") -> DemandBoard:
        return self._opened(RedisDemandBoard(self._url, namespace, timeout_s=TIMEOUT_S))

    def planner_board(self, namespace: str = "test", *, dry: bool = False) -> PlannerBoard:
        return self._opened(RedisPlannerBoard(self._url, namespace, timeout_s=TIMEOUT_S, dry=dry))

    async def pass_time(self, ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    async def lose_everything(self) -> None:
        self._deployment.clear()

    async def close(self) -> None:
        for each in self._open:
            await each.close()

    def _opened(self, what: Any) -> Any:
        self._open.append(what)
        return what


SERVERS = {
    "valkey": deployments.valkey,
    "cluster_node": deployments.cluster_node,
    "cluster_of_three": deployments.cluster_of_three,
    "sentinel": deployments.sentinel,
    "redis": deployments.redis_server,
    "tls": deployments.tls,
}
STORES = ("memory", *SERVERS)
KINDS = ("memory", "valkey", "redis", "cluster_of_three")
"""One store of each kind, for suites that do not depend on how it is reached."""
