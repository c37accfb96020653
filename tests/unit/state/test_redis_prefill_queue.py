"""What only a real server can show of the prefill queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from tests.conformance.prefill_queue import LIMITS, POOL_ID, TTL_MS, A, B, claimed, job, put
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
    await put(queue, job("s1"), job("a1", worker=A), job("s2"))
    await queue.ack(POOL_ID, await claimed(queue, A), b"")
    for _ in range(LIMITS.attempts):
        await queue.fail(POOL_ID, await claimed(queue, B), "x" if _ else "y")
        await queue.fail(POOL_ID, await claimed(queue, B), "z")
    await put(queue, job("more"))
    await claimed(queue, A)
    assert all(client.pttl(name) > 0 for name in client.keys("*"))


async def test_foreign_entries_are_swept_away(client: redis.Redis, queue: RedisPrefillQueue) -> None:
    await put(queue, job("one"))
    client.xadd(SHARED, {"something": "else"})
    client.xadd(KEYS.dead_jobs(POOL_ID), {"job": "x"})
    await put(queue, job("two"))
    assert await queue.depth(POOL_ID, []) == {None: QueueDepth(2, 200)}
    assert [(await claimed(queue, A)).job.id for _ in range(2)] == ["one", "two"]
    assert client.xlen(SHARED) == 2
    assert await queue.dead(POOL_ID) == list[DeadJob]()
    assert queue.malformed_total == 1


async def test_a_done_job_leaves_only_its_result(client: redis.Redis, queue: RedisPrefillQueue) -> None:
    await put(queue, job("one"))
    await queue.ack(POOL_ID, await claimed(queue, A), b"x")
    assert client.xlen(SHARED) == 0
    assert sorted(client.keys("*")) == sorted([SHARED.encode(), KEYS.done(POOL_ID, "one").encode()])


async def test_a_silent_store_ends_every_call(store: EmbeddedStore) -> None:
    queue = RedisPrefillQueue(store.url, "test", limits=LIMITS, timeout_s=0.2)
    patient = RedisPrefillQueue(store.url, "test", limits=LIMITS, timeout_s=10.0)
    await put(patient, job("one"))
    claim = await claimed(patient, A)
    store.pause()
    for call in (
        queue.put(POOL_ID, job("two"), TTL_MS),
        queue.claim(POOL_ID, A, wait_ms=50),
        queue.extend(POOL_ID, claim),
        queue.wait_done(POOL_ID, JobId("one"), 50),
        queue.depth(POOL_ID, [A]),
    ):
        with pytest.raises(StoreError, match="did not answer within"):
            await call
    store.resume()
    await asyncio.sleep(0.05)
    assert await patient.ack(POOL_ID, claim, b"x")
    await queue.close()
    await patient.close()


def test_the_keys_of_a_pool_share_a_slot() -> None:
    from redis.crc import key_slot

    names = [SHARED, KEYS.prefill(POOL_ID, A), KEYS.job(POOL_ID, "j"), KEYS.done(POOL_ID, "j"), KEYS.dead_jobs(POOL_ID)]
    assert len({key_slot(name.encode()) for name in names}) == 1
