"""What Sentinels, clusters and TLS do under a client: fail over, move slots, lose nodes, refuse certificates."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

import pytest
import redis
from redis.crc import key_slot

from tests.certificates import Authority
from tests.conformance.deployments import PRIMARY, SLOTS, Deployment, cluster_of_three, sentinel
from tests.conformance.registry import LEASE_MS, POOL, live, worker
from vllm_pd.errors import StoreError
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.graph.ports import LOOPBACK
from vllm_pd.state.keys import Keys
from vllm_pd.state.redis_registry import RedisRegistry

KEYS = Keys("test")
DEADLINE_S = 60.0
T = TypeVar("T")
Open = Callable[..., RedisRegistry]


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Opens registries that are closed at the end."""
    async with AsyncExitStack() as stack:

        def open_one(url: str, timeout_s: float = 10.0) -> RedisRegistry:
            registry = RedisRegistry(url, "test", timeout_s=timeout_s)
            stack.push_async_callback(registry.close)
            return registry

        yield open_one


async def until_answered(call: Callable[[], Awaitable[T]]) -> T:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return await call()
        except StoreError:
            assert time.monotonic() < deadline


async def failure(call: Awaitable[object]) -> str:
    """What the store's error says; one sentence, no secret."""
    with pytest.raises(StoreError) as error:
        await call
    text = str(error.value)
    assert text.startswith("The store ")
    assert text.endswith(".")
    assert "s3cret" not in text
    assert "0ther" not in text
    assert error.value.__cause__ is None
    return text


# Sentinel.


@pytest.fixture
def replicated() -> Iterator[Deployment]:
    with sentinel() as deployment:
        yield deployment


async def test_a_replica_that_became_primary_is_used_and_the_old_primary_is_not_when_it_is_back(
    replicated: Deployment, opened: Open
) -> None:
    registry = opened(replicated.url)
    await registry.heartbeat(worker("before:1"), LEASE_MS)
    primary, replica = replicated.servers
    primary.kill()
    await until_answered(lambda: registry.heartbeat(worker("after:1"), LEASE_MS))
    with redis.Redis.from_url(replica.url) as client:
        assert client.exists(KEYS.worker(POOL.id, "after:1"))
    # It is back, empty, on its old port; the Sentinel makes it a replica in its own time.
    primary.start()
    assert worker("after:1") in await live(opened(replicated.url))
    await registry.heartbeat(worker("later:1"), LEASE_MS)
    assert {record.id for record in await live(registry)} >= {"after:1", "later:1"}


async def test_a_silent_sentinel_does_not_keep_a_call_from_asking_the_next(
    replicated: Deployment, opened: Open
) -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        others = replicated.url.partition("://")[2]
        registry = opened(f"redis+sentinel://{LOOPBACK}:{silent.getsockname()[1]},{others}", timeout_s=6.0)
        await registry.heartbeat(worker(), LEASE_MS)
        assert await live(registry) == [worker()]


async def test_what_sentinels_do_not_know_or_refuse_is_said_without_secrets(
    replicated: Deployment, opened: Open
) -> None:
    where = replicated.url.partition("://")[2].removesuffix(f"/{PRIMARY}")
    text = await failure(opened(f"redis+sentinel://u:s3cret@{where}/other").snapshot())
    assert "no Sentinel that answers knows a primary of this name" in text
    refused = opened(f"redis+sentinel://{where}/{PRIMARY}?sentinel_password=0ther")
    assert "a Sentinel refused sentinel_username or sentinel_password" in await failure(refused.snapshot())
    stranger = opened(f"redis+sentinel://u:s3cret@{where}/{PRIMARY}")
    assert "refused the user or password" in await failure(stranger.snapshot())


# Cluster.


@pytest.fixture
def nodes() -> Iterator[Deployment]:
    with cluster_of_three() as deployment:
        yield deployment


def node_id(server: EmbeddedStore) -> str:
    with redis.Redis.from_url(server.url) as client:
        return str(client.execute_command("CLUSTER MYID").decode())


def holder_of(deployment: Deployment, key: str) -> int:
    """Which server of a fresh deployment has the key."""
    return key_slot(key.encode()) * len(deployment.servers) // SLOTS


def hand_over(deployment: Deployment, slots: range, to: int, *, told: list[int]) -> None:
    """Empty slots get another owner; `told` are the servers that learn it at once."""
    owner = node_id(deployment.servers[to])
    for n in [to, *told]:
        with redis.Redis.from_url(deployment.servers[n].url) as client, client.pipeline(transaction=False) as pipe:
            for slot in slots:
                pipe.execute_command("CLUSTER SETSLOT", slot, "NODE", owner)
            if n == to:
                pipe.execute_command("CLUSTER BUMPEPOCH")
            pipe.execute()


async def test_a_slot_that_moved_is_followed_within_the_call(nodes: Deployment, opened: Open) -> None:
    registry = opened(nodes.url)
    await registry.snapshot()
    slot = key_slot(KEYS.workers(POOL.id).encode())
    old = holder_of(nodes, KEYS.workers(POOL.id))
    new = (old + 1) % len(nodes.servers)
    hand_over(nodes, range(slot, slot + 1), new, told=[old])
    await registry.heartbeat(worker(), LEASE_MS)
    assert await live(registry) == [worker()]
    with redis.Redis.from_url(nodes.servers[new].url) as client:
        assert client.exists(KEYS.worker(POOL.id, worker().id))


async def test_a_node_that_another_one_replaced_is_not_asked_for_ever(nodes: Deployment, opened: Open) -> None:
    registry = opened(nodes.url, timeout_s=2.0)
    await until_answered(lambda: registry.heartbeat(worker(), LEASE_MS))
    dead = holder_of(nodes, KEYS.workers(POOL.id))
    heir, witness = (n for n in range(3) if n != dead)
    # Silent, not killed: a machine that lost its power refuses nothing.
    nodes.servers[dead].pause()
    await failure(registry.heartbeat(worker(), LEASE_MS))
    slots = range(SLOTS * dead // 3, SLOTS * (dead + 1) // 3)
    hand_over(nodes, slots, heir, told=[witness])
    await until_answered(lambda: registry.heartbeat(worker(), LEASE_MS))
    assert await until_answered(lambda: live(registry)) == [worker()]
    nodes.servers[dead].resume()


async def test_one_node_of_several_asked_as_a_server_says_what_the_url_must_begin_with(
    nodes: Deployment, opened: Open
) -> None:
    other = (holder_of(nodes, KEYS.pools) + 1) % 3
    text = await failure(opened(nodes.servers[other].url).snapshot())
    assert "begin the store URL with redis+cluster://" in text


async def test_an_ordinary_server_is_no_cluster(store_url: str, opened: Open) -> None:
    where = store_url.partition("://")[2]
    stranger = opened(f"redis+cluster://u:s3cret@{where}")
    assert "refused the user or password" in await failure(stranger.snapshot())
    assert "Cluster mode is not enabled" in await failure(opened(f"redis+cluster://{where}").snapshot())


# TLS and users.


async def test_certificates_are_checked_on_both_sides(
    server: Callable[[str], Deployment], opened: Open, tmp_path: Path
) -> None:
    good = server("tls").url
    registry = opened(good)
    await registry.heartbeat(worker(), LEASE_MS)
    where, _, files = good.partition("?")
    authority = files.partition("&")[0]
    await failure(opened(f"{where}?{authority}").snapshot())
    stranger = Authority(tmp_path, "stranger")
    untrusted = stranger.issue("untrusted")
    own = f"ssl_certfile={untrusted.pem}&ssl_keyfile={untrusted.key}"
    await failure(opened(f"{where}?{authority}&{own}").snapshot())
    text = await failure(opened(f"{where}?{files.replace(authority, f'ssl_ca_certs={stranger.pem}')}").snapshot())
    assert "certificate verify failed" in text
    by_name = where.replace(LOOPBACK, "localhost")
    assert "localhost" in await failure(opened(f"{by_name}?{files}").snapshot())
    unchecked = opened(f"{by_name}?{files}&ssl_check_hostname=false")
    assert worker() in await live(unchecked)


async def test_a_user_with_the_rights_that_messages_name_is_enough(opened: Open) -> None:
    rights = "on >s3cret ~{pd:* +@read +@write +@scripting +@connection +time"
    with EmbeddedStore(options={"user pd": rights}) as store:
        registry = opened(f"redis://pd:s3cret@{LOOPBACK}:{store.port}")
        await registry.heartbeat(worker(), LEASE_MS)
        assert await live(registry) == [worker()]
        wrong = opened(f"redis://pd:0ther@{LOOPBACK}:{store.port}")
        assert "refused the user or password" in await failure(wrong.snapshot())
        elsewhere = RedisRegistry(f"redis://pd:s3cret@{LOOPBACK}:{store.port}", "other", timeout_s=10.0)
        assert await live(elsewhere) == []
        await elsewhere.close()
