"""What every `DemandBoard` must do. A test module subclasses it; `harness` is a fixture."""

from __future__ import annotations

import pytest

from tests.conformance.harness import Harness
from tests.conformance.registry import LEASE_MS, OTHER_POOL, POOL
from vllm_pd.routing.model import Rates
from vllm_pd.state.demand import BOUNDS_S, DemandReport, Spread

SPREAD = Spread(tuple(range(len(BOUNDS_S) + 1)), 12.5)
REPORT = DemandReport(
    started_ms=1_764_000_000_000,
    at_ms=1_764_000_001_000,
    arrivals=7,
    finished=5,
    prompt_tokens=9000,
    uncached_tokens=1 << 40,
    output_tokens=640,
    finished_output_tokens=500,
    ttft=SPREAD,
    itl=SPREAD,
    answer_itl=SPREAD,
    rates=Rates(step_base=0.01),
)
LATER = DemandReport(started_ms=1_764_000_000_000, at_ms=1_764_000_002_000)


class DemandConformance:
    """Inherit where there is a fixture `harness`."""

    async def test_a_report_comes_back_whole_until_the_router_replaces_it(self, harness: Harness) -> None:
        board, reader = harness.demand(), harness.demand()
        assert await reader.read(POOL.id) == {}
        await board.publish(POOL.id, "r1", REPORT, LEASE_MS)
        await board.publish(POOL.id, "r2", LATER, LEASE_MS)
        assert await reader.read(POOL.id) == {"r1": REPORT, "r2": LATER}
        await board.publish(POOL.id, "r1", LATER, LEASE_MS)
        assert await reader.read(POOL.id) == {"r1": LATER, "r2": LATER}
        assert await reader.read(OTHER_POOL.id) == {}
        assert await harness.demand("elsewhere").read(POOL.id) == {}

    async def test_a_report_ends_unless_repeated(self, harness: Harness) -> None:
        board = harness.demand()
        await board.publish(POOL.id, "gone", REPORT, 40)
        await board.publish(POOL.id, "stays", REPORT, 40)
        await board.publish(POOL.id, "stays", LATER, LEASE_MS)
        await harness.pass_time(60)
        assert await board.read(POOL.id) == {"stays": LATER}

    async def test_an_emptied_store_has_no_reports(self, harness: Harness) -> None:
        board = harness.demand()
        await board.publish(POOL.id, "r1", REPORT, LEASE_MS)
        await harness.lose_everything()
        assert await board.read(POOL.id) == {}

    async def test_close_can_be_repeated(self, harness: Harness) -> None:
        board = harness.demand()
        await board.read(POOL.id)
        await board.close()
        await board.close()

    def test_a_namespace_that_cannot_be_part_of_a_key_is_refused(self, harness: Harness) -> None:
        with pytest.raises(ValueError, match="--pd-namespace"):
            harness.demand("a:b")
