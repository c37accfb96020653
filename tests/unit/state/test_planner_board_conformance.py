"""The suite of the planners' board on every kind of store, and what only a real server can show."""

from __future__ import annotations

import pytest
import redis

from tests.conformance.planner_board import FIRST, SECOND, PlannerBoardConformance
from tests.conformance.registry import LEASE_MS, POOL
from tests.conformance.servers import KINDS
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state.keys import Keys
from vllm_pd.state.redis_planner_board import RedisPlannerBoard

KEYS = Keys("test")


@pytest.mark.parametrize("harness", KINDS, indirect=True)
class TestPlannerBoard(PlannerBoardConformance):
    pass


async def test_all_keys_end_by_themselves_and_the_journal_is_bounded() -> None:
    with EmbeddedStore() as store, redis.Redis.from_url(store.url) as client:
        board = RedisPlannerBoard(store.url, "test", timeout_s=5.0)
        term = (await board.lead(POOL.id, FIRST, LEASE_MS)).term
        for _ in range(12):
            assert await board.write(POOL.id, term, memory=b"m", newest=b"n", journal=[b"s"] * 500)
        for key in (KEYS.planner(POOL.id), KEYS.plan_memory(POOL.id), KEYS.plans(POOL.id)):
            assert client.pttl(key) > 0
        assert 5000 <= client.xlen(KEYS.plans(POOL.id)) < 5500
        await board.close()


async def test_a_clock_that_was_set_back_keeps_nobody_from_leading() -> None:
    with EmbeddedStore() as store, redis.Redis.from_url(store.url) as client:
        board = RedisPlannerBoard(store.url, "test", timeout_s=5.0)
        won = await board.lead(POOL.id, FIRST, LEASE_MS)
        # As if it had been written an hour from now.
        client.hincrby(KEYS.planner(POOL.id), "ends", 3_600_000)
        taken = await board.lead(POOL.id, SECOND, LEASE_MS)
        assert taken.planner == SECOND
        assert taken.term > won.term
        await board.close()


async def test_what_another_program_wrote_there_gives_way() -> None:
    with EmbeddedStore() as store, redis.Redis.from_url(store.url) as client:
        board = RedisPlannerBoard(store.url, "test", timeout_s=5.0)
        client.hset(KEYS.planner(POOL.id), mapping={"planner": b"\xff", "term": "x", "ends": "soon"})
        assert (await board.lead(POOL.id, FIRST, LEASE_MS)).planner == FIRST
        await board.close()
