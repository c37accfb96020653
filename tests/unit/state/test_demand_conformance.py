"""The suite of demand reports on every kind of store, and what only a real server can show."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import redis

from tests.conformance.demand import REPORT, DemandConformance
from tests.conformance.registry import LEASE_MS, POOL
from tests.conformance.servers import KINDS
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.routing.model import Rates
from vllm_pd.state.demand import Spread
from vllm_pd.state.keys import Keys
from vllm_pd.state.redis_demand import RedisDemandBoard, decode_report, encode_report

KEY = Keys("test").demand(POOL.id)


@pytest.mark.parametrize("harness", KINDS, indirect=True)
class TestDemand(DemandConformance):
    pass


async def test_the_key_ends_by_itself_and_foreign_fields_cost_only_themselves() -> None:
    with EmbeddedStore() as store, redis.Redis.from_url(store.url) as client:
        board = RedisDemandBoard(store.url, "test", timeout_s=5.0)
        client.hset(KEY, mapping={"bad": "x", "worse": b"99999999999999:\x81", b"\xff": "99999999999999:", "old": "5:"})
        await board.publish(POOL.id, "r1", REPORT, LEASE_MS)
        assert await board.read(POOL.id) == {"r1": REPORT}
        assert board.malformed_total == 3
        assert not client.hexists(KEY, "old")
        assert 0 < client.pttl(KEY) <= LEASE_MS
        await board.close()


@pytest.mark.parametrize(
    "wrong",
    [
        replace(REPORT, arrivals=-1),
        replace(REPORT, ttft=Spread((1, 2), 0.1)),
        replace(REPORT, itl=replace(REPORT.itl, sum_s=math.nan)),
        replace(REPORT, rates=Rates(step_base=math.inf)),
    ],
)
def test_what_no_router_can_have_counted_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"other buckets|below 0|not finite"):
        decode_report(encode_report(wrong))  # type: ignore[arg-type]
