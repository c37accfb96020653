"""Comparing the index with what workers say they hold, quiet and under way."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest
import redis

from tests.conformance.block_index import GPU, TTL_MS, grouped, packed, whatever
from tests.conformance.registry import LEASE_MS, POOL, worker
from vllm_pd.errors import IndexLost
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state import (
    BlockIndex,
    Epoch,
    Holder,
    MemoryBlockIndex,
    MemoryStore,
    Tier,
    WorkerId,
    WorkerRecord,
    WorkerState,
)
from vllm_pd.state.index_check import Verdict, check_cache, check_pool
from vllm_pd.state.keys import Keys, cache_name
from vllm_pd.state.redis_block_index import RedisBlockIndex

A = dataclasses.replace(worker("a:1"), dp_size=1)
HOLDER = Holder(A.id)


def states(*records: WorkerRecord) -> list[WorkerState]:
    return [WorkerState(record, LEASE_MS) for record in records]


async def test_every_cache_of_a_pool_gets_its_verdict() -> None:
    index = MemoryBlockIndex("test", MemoryStore())
    two_ranks = worker("b:1")
    await index.writer(POOL.id, HOLDER, A.epoch, TTL_MS).replace({GPU: packed(range(3)), 5: packed([9])})
    await index.writer(POOL.id, Holder(two_ranks.id, 1), two_ranks.epoch, TTL_MS).replace({})
    await index.writer(POOL.id, Holder(WorkerId("gone:1")), Epoch(5), TTL_MS).replace({GPU: packed([1])})
    checks = await check_pool(index, POOL.id, states(A, two_ranks))
    assert [(check.holder.worker, check.holder.rank, check.verdict) for check in checks] == [
        ("a:1", 0, Verdict.EQUAL),
        ("b:1", 0, Verdict.ABSENT),
        ("b:1", 1, Verdict.EQUAL),
        ("gone:1", 0, Verdict.ORPHAN),
    ]
    assert (checks[0].blocks(Tier.GPU), checks[0].blocks(Tier.SSD), checks[0].blocks(Tier.CPU)) == (
        (4, 4),
        (1, 1),
        (0, 0),
    )


@pytest.mark.parametrize("damage", ["one more", "one less", "another key", "another tier"])
async def test_damage_in_the_store_is_found(damage: str) -> None:
    with EmbeddedStore() as store, redis.Redis.from_url(store.url) as client:
        index = RedisBlockIndex(store.url, "test", timeout_s=5.0)
        await index.writer(POOL.id, HOLDER, A.epoch, TTL_MS).replace({GPU: packed(range(3000))})
        assert (await check_cache(index, POOL.id, HOLDER, A.epoch)).verdict is Verdict.EQUAL
        slab = Keys("test").slab(POOL.id, cache_name(HOLDER, A.epoch), 1, 1)
        match damage:
            case "one more":
                client.setrange(slab, 2039, b"\x01")
            case "one less":
                client.setrange(slab, 0, b"\x00")
            case "another key":
                client.setrange(slab, 2040, b"\x00")
            case _:
                client.setrange(slab, 0, b"\x02")
        check = await check_cache(index, POOL.id, HOLDER, A.epoch)
        assert check.verdict is Verdict.DIFFERS
        await index.close()


async def test_a_cache_that_never_rests_is_compared_at_a_change() -> None:
    with EmbeddedStore() as store:
        index: BlockIndex = RedisBlockIndex(store.url, "test", timeout_s=10.0)
        writer = index.writer(POOL.id, HOLDER, A.epoch, TTL_MS)
        await writer.replace({GPU: packed(range(10_000, 40_000))})
        truth: dict[bytes, int] = {}
        done = asyncio.Event()

        async def churn() -> None:
            chance = random.Random(2)
            while not done.is_set():
                await writer.write(whatever(truth, chance, 2000))
                if chance.random() < 0.02:
                    await writer.replace(grouped(truth))

        task = asyncio.create_task(churn())
        checks = [await check_cache(index, POOL.id, HOLDER, A.epoch) for _ in range(10)]
        done.set()
        await task
        assert [check.verdict for check in checks] == [Verdict.EQUAL] * 10
        assert len({check.seq for check in checks}) > 1
        await index.close()


async def test_a_stream_without_the_changes_is_an_error_after_some_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    index = MemoryBlockIndex("test", MemoryStore())
    await index.writer(POOL.id, HOLDER, A.epoch, TTL_MS).replace({GPU: packed(range(3))})
    held = await index.held(POOL.id, HOLDER, A.epoch)
    assert held is not None

    async def later(*_: object) -> object:
        return dataclasses.replace(held, stated_seq=held.seq + 1)

    monkeypatch.setattr(index, "held", later)
    with pytest.raises(IndexLost):
        await check_cache(index, POOL.id, HOLDER, A.epoch)
