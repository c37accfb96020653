"""The stores that every conformance suite runs on: memory, Valkey, Valkey in cluster mode, and Redis if installed."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.graph.ports import free_port
from vllm_pd.state import BlockIndex, MemoryBlockIndex, MemoryRegistry, MemoryStore, Registry
from vllm_pd.state.redis_block_index import RedisBlockIndex
from vllm_pd.state.redis_registry import RedisRegistry

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

    async def pass_time(self, ms: int) -> None:
        self._now += ms / 1000

    async def lose_everything(self) -> None:
        self._store.clear()

    async def close(self) -> None:
        return None


class RedisHarness:
    """A server's clock is the real one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._open: list[Any] = []

    def registry(self, namespace: str = "test") -> Registry:
        return self._opened(RedisRegistry(self._url, namespace, timeout_s=TIMEOUT_S))

    def block_index(self, namespace: str = "test") -> BlockIndex:
        return self._opened(RedisBlockIndex(self._url, namespace, timeout_s=TIMEOUT_S))

    async def pass_time(self, ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    async def lose_everything(self) -> None:
        with redis.Redis.from_url(self._url) as client:
            client.flushall()

    async def close(self) -> None:
        for each in self._open:
            await each.close()

    def _opened(self, what: Any) -> Any:
        self._open.append(what)
        return what


@contextmanager
def valkey() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@contextmanager
def valkey_cluster() -> Iterator[EmbeddedStore]:
    """One node in cluster mode that has every slot."""
    with EmbeddedStore(options={"cluster-enabled": "yes", "cluster-port": str(free_port())}) as store:
        with redis.Redis.from_url(store.url) as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            deadline = time.monotonic() + 30
            while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                assert time.monotonic() < deadline, "the cluster did not accept its slots"
                time.sleep(0.05)
        yield store


@contextmanager
def redis_server() -> Iterator[EmbeddedStore]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("there is no redis-server on PATH")
    with EmbeddedStore(binary=Path(binary)) as store:
        yield store


SERVERS = {"valkey": valkey, "valkey_cluster": valkey_cluster, "redis_server": redis_server}
STORES = ("memory", *SERVERS)
