"""What every `PlannerBoard` must do. A test module subclasses it; `harness` is a fixture."""

from __future__ import annotations

import pytest

from tests.conformance.harness import Harness
from tests.conformance.registry import LEASE_MS, OTHER_POOL, POOL

FIRST, SECOND = "host-a:1", "host-b:2"


class PlannerBoardConformance:
    """Inherit where there is a fixture `harness`."""

    async def test_one_planner_leads_and_the_others_hear_who(self, harness: Harness) -> None:
        one, other = harness.planner_board(), harness.planner_board()
        assert await one.leader(POOL.id) is None
        won = await one.lead(POOL.id, FIRST, LEASE_MS)
        assert (won.planner, 0 < won.left_ms <= LEASE_MS, won.term > 0) == (FIRST, True, True)
        heard = await other.lead(POOL.id, SECOND, LEASE_MS)
        assert (heard.planner, heard.term) == (FIRST, won.term)
        assert 0 < heard.left_ms <= LEASE_MS
        renewed = await one.lead(POOL.id, FIRST, LEASE_MS)
        assert (renewed.planner, renewed.term) == (FIRST, won.term)
        seen = await other.leader(POOL.id)
        assert seen is not None
        assert (seen.planner, seen.term) == (FIRST, won.term)

    async def test_every_pool_and_namespace_has_its_own_leader(self, harness: Harness) -> None:
        await harness.planner_board().lead(POOL.id, FIRST, LEASE_MS)
        assert (await harness.planner_board().lead(OTHER_POOL.id, SECOND, LEASE_MS)).planner == SECOND
        assert (await harness.planner_board("elsewhere").lead(POOL.id, SECOND, LEASE_MS)).planner == SECOND

    async def test_after_the_lease_another_leads_in_a_later_term(self, harness: Harness) -> None:
        one, other = harness.planner_board(), harness.planner_board()
        won = await one.lead(POOL.id, FIRST, 40)
        await harness.pass_time(60)
        assert await one.leader(POOL.id) is None
        next_one = await other.lead(POOL.id, SECOND, LEASE_MS)
        assert next_one.planner == SECOND
        assert next_one.term > won.term
        assert next_one.now_ms > won.now_ms

    async def test_a_leader_that_was_late_begins_a_new_term(self, harness: Harness) -> None:
        board = harness.planner_board()
        won = await board.lead(POOL.id, FIRST, 40)
        await harness.pass_time(60)
        assert (await board.lead(POOL.id, FIRST, LEASE_MS)).term > won.term

    async def test_who_resigns_lets_another_lead_at_once(self, harness: Harness) -> None:
        one, other = harness.planner_board(), harness.planner_board()
        won = await one.lead(POOL.id, FIRST, LEASE_MS)
        assert not await other.resign(POOL.id, SECOND, won.term)
        assert not await one.resign(POOL.id, FIRST, won.term - 1)
        assert await one.resign(POOL.id, FIRST, won.term)
        assert not await one.resign(POOL.id, FIRST, won.term)
        assert (await other.lead(POOL.id, SECOND, LEASE_MS)).term > won.term

    async def test_what_the_leader_writes_is_what_the_next_one_reads(self, harness: Harness) -> None:
        one, other = harness.planner_board(), harness.planner_board()
        assert await other.memory(POOL.id) is None
        assert await other.newest(POOL.id) is None
        assert await other.journal(POOL.id, 10) == []
        term = (await one.lead(POOL.id, FIRST, LEASE_MS)).term
        assert await one.write(POOL.id, term, memory=b"m1", newest=b"n1", journal=[b"s1", b"s2"])
        assert await one.write(POOL.id, term, memory=b"m2", newest=b"\xff\x00", journal=[])
        assert await one.write(POOL.id, term, memory=b"m3", newest=b"n3", journal=[b"s3"])
        assert await other.memory(POOL.id) == b"m3"
        assert await other.newest(POOL.id) == b"n3"
        assert list(await other.journal(POOL.id, 10)) == [b"s1", b"s2", b"s3"]
        assert list(await other.journal(POOL.id, 2)) == [b"s2", b"s3"]
        assert await other.memory(OTHER_POOL.id) is None

    async def test_a_former_leader_writes_nothing(self, harness: Harness) -> None:
        one, other = harness.planner_board(), harness.planner_board()
        old = (await one.lead(POOL.id, FIRST, LEASE_MS)).term
        assert await one.write(POOL.id, old, memory=b"old", newest=b"old", journal=[b"old"])
        assert (await one.lead(POOL.id, FIRST, 40)).term == old
        await harness.pass_time(60)
        assert not await one.write(POOL.id, old, memory=b"late", newest=b"late", journal=[b"late"])
        new = (await other.lead(POOL.id, SECOND, LEASE_MS)).term
        assert not await one.write(POOL.id, old, memory=b"late", newest=b"late", journal=[b"late"])
        assert await other.memory(POOL.id) == b"old"
        assert await other.write(POOL.id, new, memory=b"new", newest=b"new", journal=[b"new"])
        assert list(await one.journal(POOL.id, 10)) == [b"old", b"new"]

    async def test_those_that_only_try_out_are_apart(self, harness: Harness) -> None:
        real, dry = harness.planner_board(), harness.planner_board(dry=True)
        await real.lead(POOL.id, FIRST, LEASE_MS)
        tried = await dry.lead(POOL.id, SECOND, LEASE_MS)
        assert tried.planner == SECOND
        assert await dry.write(POOL.id, tried.term, memory=b"m", newest=b"n", journal=[b"s"])
        assert await real.memory(POOL.id) is None
        assert await real.journal(POOL.id, 10) == []

    async def test_pools_that_were_planned_are_known_for_as_long_as_their_journal(self, harness: Harness) -> None:
        board, dry = harness.planner_board(), harness.planner_board(dry=True)
        assert await board.pools() == []
        for pool, planner in ((OTHER_POOL.id, SECOND), (POOL.id, FIRST)):
            term = (await board.lead(pool, planner, LEASE_MS)).term
            for _ in range(2):
                assert await board.write(pool, term, memory=b"m", newest=b"n", journal=[b"s"])
        assert await board.pools() == sorted([POOL.id, OTHER_POOL.id])
        assert await dry.pools() == await harness.planner_board("elsewhere").pools() == []

    async def test_an_emptied_store_has_no_leader_and_no_memory(self, harness: Harness) -> None:
        board = harness.planner_board()
        won = await board.lead(POOL.id, FIRST, LEASE_MS)
        await board.write(POOL.id, won.term, memory=b"m", newest=b"n", journal=[b"s"])
        await harness.lose_everything()
        await harness.pass_time(2)
        assert not await board.write(POOL.id, won.term, memory=b"m", newest=b"n", journal=[b"s"])
        assert await board.memory(POOL.id) is None
        assert (await board.lead(POOL.id, FIRST, LEASE_MS)).term > won.term

    async def test_close_can_be_repeated(self, harness: Harness) -> None:
        board = harness.planner_board()
        await board.leader(POOL.id)
        await board.close()
        await board.close()

    def test_a_namespace_that_cannot_be_part_of_a_key_is_refused(self, harness: Harness) -> None:
        with pytest.raises(ValueError, match="--pd-namespace"):
            harness.planner_board("")
