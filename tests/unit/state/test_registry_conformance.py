"""The conformance suite on every registry: in memory, on Valkey, on Valkey in cluster mode, on Redis if installed."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from tests.conformance.registry import Harness, RegistryConformance
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.graph.ports import free_port
from vllm_pd.state import MemoryRegistry, MemoryStore, Registry
from vllm_pd.state.redis_registry import RedisRegistry


class MemoryHarness:
    """The clock moves only when a test says so."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._store = MemoryStore(clock=lambda: self._now)

    def registry(self, namespace: str = "test") -> Registry:
        return MemoryRegistry(namespace, self._store)

    async def pass_time(self, ms: int) -> None:
        self._now += ms / 1000

    async def lose_everything(self) -> None:
        self._store.clear()


class RedisHarness:
    def __init__(self, url: str) -> None:
        self._url = url
        self._open: list[RedisRegistry] = []

    def registry(self, namespace: str = "test") -> Registry:
        registry = RedisRegistry(self._url, namespace, timeout_s=10.0)
        self._open.append(registry)
        return registry

    async def pass_time(self, ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    async def lose_everything(self) -> None:
        with redis.Redis.from_url(self._url) as client:
            client.flushall()

    async def close(self) -> None:
        for registry in self._open:
            await registry.close()


def clustered(store: EmbeddedStore) -> EmbeddedStore:
    """Give the one node every slot, and return when it accepts writes."""
    with redis.Redis.from_url(store.url) as client:
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        deadline = time.monotonic() + 30
        while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
            assert time.monotonic() < deadline, "the cluster did not accept its slots"
            time.sleep(0.05)
    return store


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@pytest.fixture(scope="module")
def valkey_cluster() -> Iterator[EmbeddedStore]:
    options = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
    with EmbeddedStore(options=options) as store:
        yield clustered(store)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[EmbeddedStore]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("there is no redis-server on PATH")
    with EmbeddedStore(binary=Path(binary)) as store:
        yield store


class TestMemory(RegistryConformance):
    @pytest.fixture
    def harness(self) -> Harness:
        return MemoryHarness()


class _OnServer(RegistryConformance):
    server: str

    @pytest.fixture
    async def harness(self, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
        store: EmbeddedStore = request.getfixturevalue(self.server)
        harness = RedisHarness(store.url)
        await harness.lose_everything()
        yield harness
        await harness.close()


class TestValkey(_OnServer):
    server = "valkey"


class TestValkeyCluster(_OnServer):
    server = "valkey_cluster"


class TestRedisServer(_OnServer):
    server = "redis_server"
