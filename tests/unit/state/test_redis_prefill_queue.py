"""What only a real server can show of the prefill queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from tests.conformance.prefill_queue import (
    LIMITS,
    POOL_ID,
    ROUTER,
    TTL_MS,
    A,
    B,
    at,
    claim,
    claims,
    job,
    names,
    nothing,
    put,
    waited_for,
)
from vllm_pd.errors import StoreError
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state import DeadJob, JobId, QueueDepth
from vllm_pd.state.keys import Keys
from vllm_pd.state.redis_prefill_queue import RedisPrefillQueue

KEYS = Keys("test")
SHARED = KEYS.prefill(POOL_ID, None)


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@pytest.fixture
async def queue(store: EmbeddedStore) -> AsyncIterator[RedisPrefillQueue]:
    queue = RedisPrefillQueue(store.url, "test", limits=LIMITS, timeout_s=5.0)
    yield queue
    await queue.close()


@pytest.fixture
def client(store: EmbeddedStore) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(store.url) as client:
        yield client


async def test_every_key_ends_by_itself(client: redis.Redis, queue: RedisPrefillQueue) -> None:
    await queue.announce_router(POOL_ID, ROUTER, 60_000)
    await put(queue, waited_for("s1"), waited_for("a1", worker=A), job("s2"))
    await queue.ack(POOL_ID, await claim(queue, A), b"")
    for _ in range(2 * LIMITS.attempts):
        await queue.fail(POOL_ID, await claim(queue, B), "x")
    await put(queue, job("more"), job("cancelled", worker=B), job("b1", worker=B))
    await claim(queue, A)
    assert (await claim(queue, B)).job.id == "cancelled"
    await queue.cancel(POOL_ID, JobId("cancelled"))
    kinds = {name.decode().rsplit("}:", 1)[1].split(":")[0] for name in client.keys("*")}
    assert kinds == {"prefill", "job", "done", "results", "router", "owners", "claims", "cancelled", "dead"}
    assert all(client.pttl(name) > 0 for name in client.keys("*"))


async def test_foreign_entries_are_swept_away(client: redis.Redis, queue: RedisPrefillQueue) -> None:
    await put(queue, job("one"))
    client.xadd(SHARED, {"something": "else"})
    client.xadd(SHARED, {"a": "b", "c": "d", "e": "f", "g": "h", "i": "j"})
    client.xadd(KEYS.dead_jobs(POOL_ID), {"job": "x"})
    client.xadd(KEYS.results(POOL_ID, ROUTER), {"job": "x"})
    await put(queue, job("two"))
    assert await queue.depth(POOL_ID, []) == {None: QueueDepth(2, 200)}
    assert names(await claims(queue, A, 2)) == ["one", "two"]
    assert await queue.claim(POOL_ID, at(A), fits=-1) is None
    assert client.xlen(SHARED) == 2
    assert await queue.dead(POOL_ID) == list[DeadJob]()
    assert await queue.results(POOL_ID, ROUTER) == []
    assert queue.malformed_total == 2


async def test_a_done_job_leaves_only_its_result(client: redis.Redis, queue: RedisPrefillQueue) -> None:
    await put(queue, waited_for("one"))
    await queue.ack(POOL_ID, await claim(queue, A), b"x")
    assert await queue.streams(POOL_ID) == []
    assert client.xlen(SHARED) == client.xpending(SHARED, "workers")["pending"] == 0
    left = [SHARED, KEYS.done(POOL_ID, "one"), KEYS.results(POOL_ID, ROUTER)]
    assert sorted(client.keys("*")) == sorted(name.encode() for name in left)
    assert [name for name, _ in await queue.results(POOL_ID, ROUTER)] == ["one"]
    assert await queue.results(POOL_ID, ROUTER) == []
    assert client.xlen(KEYS.results(POOL_ID, ROUTER)) == 0


async def test_results_whose_answer_got_lost_are_there_again(queue: RedisPrefillQueue, store: EmbeddedStore) -> None:
    await put(queue, waited_for("one"), waited_for("two"))
    for claimed in await claims(queue, A, 2):
        await queue.ack(POOL_ID, claimed, b"x")
    first = await queue.results(POOL_ID, ROUTER)
    restarted = RedisPrefillQueue(store.url, "test", limits=LIMITS, timeout_s=5.0)
    assert await restarted.results(POOL_ID, ROUTER) == first
    assert len(first) == 2
    await restarted.close()


async def test_a_claim_whose_answer_got_lost_is_answered_again(
    queue: RedisPrefillQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its job would wait until it is missed, with its worker idle."""
    run = queue._run

    async def lose(*args: object) -> None:
        await run(*args)  # type: ignore[arg-type]
        raise StoreError("lost")

    await put(queue, job("one"), job("two"), job("three"))
    for _ in range(2):
        monkeypatch.setattr(queue, "_run", lose)
        with pytest.raises(StoreError):
            await queue.claim(POOL_ID, at(A), fits=-1)
    monkeypatch.setattr(queue, "_run", run)
    found = await claims(queue, A, 3)
    assert names(found) == ["one", "two", "three"]
    assert [each.attempt for each in found] == [1, 1, 1]
    assert await nothing(queue, A)
    assert all([await queue.ack(POOL_ID, each, b"") for each in found])


async def test_results_that_came_to_a_store_whose_clock_is_behind_are_seen(
    queue: RedisPrefillQueue, store: EmbeddedStore
) -> None:
    for name, entry in (("one", "9999999999999-0"), ("two", "1-0")):
        with redis.Redis.from_url(store.url) as client:
            fields = {"job": name, "worker": A, "kind": "d", "data": b"x"}
            client.xadd(KEYS.results(POOL_ID, ROUTER), fields, id=entry)  # type: ignore[arg-type]
        assert [found for found, _ in await queue.results(POOL_ID, ROUTER, 5000)] == [name]
        store.kill()
        with pytest.raises(StoreError):
            await queue.results(POOL_ID, ROUTER, 5000)
        store.start()


async def test_a_burst_shares_connections(store: EmbeddedStore, client: redis.Redis) -> None:
    queue = RedisPrefillQueue(store.url, "test", timeout_s=20.0)
    await asyncio.gather(*(put(queue, waited_for(f"job{n}")) for n in range(300)))
    assert len(client.client_list()) < 30
    claimed = await asyncio.gather(*(claim(queue, A) for _ in range(300)))
    assert len({each.job.id for each in claimed}) == 300
    await asyncio.gather(*(queue.ack(POOL_ID, each, b"x") for each in claimed))
    found = [await queue.results(POOL_ID, ROUTER, 5000) for _ in range(5)]
    assert {name for names in found for name, _ in names} == {each.job.id for each in claimed}
    await queue.close()


async def test_a_silent_store_ends_every_call(store: EmbeddedStore) -> None:
    queue = RedisPrefillQueue(store.url, "test", limits=LIMITS, timeout_s=0.2)
    patient = RedisPrefillQueue(store.url, "test", limits=LIMITS, timeout_s=10.0)
    await put(patient, waited_for("one"))
    claimed = await claim(patient, A)
    store.pause()
    for call in (
        queue.put(POOL_ID, job("two"), TTL_MS),
        queue.claim(POOL_ID, at(A), fits=-1, wait_ms=50),
        queue.extend(POOL_ID, claimed),
        queue.ack(POOL_ID, claimed, b"x"),
        queue.cancel(POOL_ID, JobId("two")),
        queue.announce_router(POOL_ID, ROUTER, 60_000),
        queue.results(POOL_ID, ROUTER, 50),
        queue.depth(POOL_ID, [A]),
    ):
        with pytest.raises(StoreError, match="did not answer within"):
            await call
    store.resume()
    # Whether the store has got any of these calls or not: a repetition is answered alike.
    assert await patient.ack(POOL_ID, claimed, b"x")
    assert [name for name, _ in await patient.results(POOL_ID, ROUTER, 5000)] == ["one"]
    await queue.close()
    await patient.close()


def test_the_keys_of_a_pool_share_a_slot() -> None:
    from redis.crc import key_slot

    one_each = (KEYS.job, KEYS.done, KEYS.results, KEYS.router, KEYS.claims, KEYS.cancelled)
    keys = [SHARED, KEYS.prefill(POOL_ID, A), KEYS.dead_jobs(POOL_ID), KEYS.owners(POOL_ID), KEYS.worker(POOL_ID, A)]
    keys += [key(POOL_ID, "x") for key in one_each]
    assert len({key_slot(key.encode()) for key in keys}) == 1
