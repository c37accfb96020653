"""What every `Roles` must do. A test module subclasses it; `harness` is a fixture."""

from __future__ import annotations

import pytest

from tests.conformance.harness import Harness
from tests.conformance.registry import LEASE_MS, OTHER_POOL, POOL
from vllm_pd.state import Epoch, Role, WantedRole, Wished, WorkerId

ID = WorkerId("[::1]:8000")
A, B, C = WorkerId("a:1"), WorkerId("b:1"), WorkerId("c:1")
OLD, NEW = Epoch(1_764_000_000_000), Epoch(1_764_000_000_001)


class RolesConformance:
    """Inherit where there is a fixture `harness`."""

    async def test_a_wish_is_seen_by_everybody_until_replaced(self, harness: Harness) -> None:
        roles, reader = harness.roles(), harness.roles()
        assert await reader.get(POOL.id) == {}
        assert await roles.set(POOL.id, ID, WantedRole(Role.PREFILL, OLD), LEASE_MS)
        assert await roles.set(POOL.id, WorkerId("b:1"), WantedRole(Role.BOTH, OLD), LEASE_MS)
        assert await roles.set(POOL.id, ID, WantedRole(Role.DECODE, OLD), LEASE_MS)
        assert await reader.get(POOL.id) == {
            ID: WantedRole(Role.DECODE, OLD),
            WorkerId("b:1"): WantedRole(Role.BOTH, OLD),
        }
        assert await reader.get(OTHER_POOL.id) == {}
        assert await harness.roles("elsewhere").get(POOL.id) == {}

    async def test_a_wish_is_read_back_whole_and_alone(self, harness: Harness) -> None:
        roles = harness.roles()
        wish = WantedRole(Role.PREFILL, OLD, id="a:b-1", by="planner", timeout_ms=30_000)
        assert await roles.of(POOL.id, ID) is None
        await roles.set(POOL.id, ID, wish, LEASE_MS)
        await roles.set(POOL.id, A, WantedRole(Role.BOTH, OLD), LEASE_MS)
        assert await roles.of(POOL.id, ID) == wish
        assert (await roles.get(POOL.id))[ID] == wish
        assert await roles.of(OTHER_POOL.id, ID) is None
        await roles.set(POOL.id, ID, wish, 40)
        await harness.pass_time(60)
        assert await roles.of(POOL.id, ID) is None

    async def test_only_the_wish_that_is_meant_is_taken_back(self, harness: Harness) -> None:
        roles = harness.roles()
        await roles.set(POOL.id, ID, WantedRole(Role.PREFILL, OLD, id="two"), LEASE_MS)
        assert not await roles.clear(POOL.id, ID, OLD, "one")
        assert await roles.of(POOL.id, ID) is not None
        assert await roles.clear(POOL.id, ID, OLD, "two")
        assert await roles.of(POOL.id, ID) is None

    async def test_of_two_who_wish_the_last_two_of_a_kind_away_one_is_refused(self, harness: Harness) -> None:
        one, two = harness.roles(), harness.roles()
        away = WantedRole(Role.DECODE, OLD)
        stays = {Role.PREFILL: [(B, OLD)]}
        assert await one.set_unless_last(POOL.id, A, away, LEASE_MS, stays) is Wished.WISHED
        assert await two.set_unless_last(POOL.id, B, away, LEASE_MS, {Role.PREFILL: [(A, OLD)]}) is Wished.LAST
        assert await two.of(POOL.id, B) is None
        # With a third one there is room; and of another kind nobody was asked for.
        stays = {Role.PREFILL: [(A, OLD), (C, OLD)]}
        assert await two.set_unless_last(POOL.id, B, away, LEASE_MS, stays) is Wished.WISHED
        nobody: dict[Role, list[tuple[WorkerId, Epoch]]] = {Role.DECODE: []}
        assert await one.set_unless_last(POOL.id, C, WantedRole(Role.PREFILL, OLD), LEASE_MS, nobody) is Wished.LAST

    async def test_who_is_wished_to_do_both_or_was_meant_before_a_restart_stays(self, harness: Harness) -> None:
        roles = harness.roles()
        away = WantedRole(Role.PREFILL, OLD)
        stays = {Role.DECODE: [(B, NEW)], Role.PREFILL: [(C, OLD)]}
        await roles.set(POOL.id, B, away, LEASE_MS)
        await roles.set(POOL.id, C, WantedRole(Role.BOTH, OLD), LEASE_MS)
        assert await roles.set_unless_last(POOL.id, A, away, LEASE_MS, stays) is Wished.WISHED
        await roles.set(POOL.id, B, WantedRole(Role.PREFILL, NEW), LEASE_MS)
        assert await roles.set_unless_last(POOL.id, A, away, LEASE_MS, stays) is Wished.LAST
        await roles.set(POOL.id, B, WantedRole(Role.PREFILL, NEW), 40)
        await harness.pass_time(60)
        assert await roles.set_unless_last(POOL.id, A, away, LEASE_MS, stays) is Wished.WISHED
        old = WantedRole(Role.PREFILL, Epoch(OLD - 1))
        assert await roles.set_unless_last(POOL.id, A, old, LEASE_MS, {}) is Wished.OLD

    async def test_a_planner_that_was_deposed_wishes_nothing_more(self, harness: Harness) -> None:
        roles, board = harness.roles(), harness.planner_board()
        old = (await board.lead(POOL.id, "one", 40)).term
        first = WantedRole(Role.PREFILL, OLD, by="planner")
        assert await roles.set_unless_last(POOL.id, A, first, LEASE_MS, {}, term=old) is Wished.WISHED
        await harness.pass_time(60)
        # Nobody else leads yet, so nothing was decided that this could contradict.
        assert await roles.set_unless_last(POOL.id, B, first, LEASE_MS, {}, term=old) is Wished.WISHED
        new = (await board.lead(POOL.id, "two", LEASE_MS)).term
        late = WantedRole(Role.DECODE, OLD, by="planner")
        assert await roles.set_unless_last(POOL.id, A, late, LEASE_MS, {}, term=old) is Wished.DEPOSED
        assert await roles.of(POOL.id, A) == first
        assert await roles.set_unless_last(POOL.id, A, late, LEASE_MS, {}, term=new) is Wished.WISHED
        # Another pool has leaders of its own, those that only try out depose nobody, and people need no term.
        assert await roles.set_unless_last(OTHER_POOL.id, A, late, LEASE_MS, {}, term=old) is Wished.WISHED
        await harness.planner_board(dry=True).lead(OTHER_POOL.id, "dry", LEASE_MS)
        assert await roles.set_unless_last(OTHER_POOL.id, B, late, LEASE_MS, {}, term=old) is Wished.WISHED
        assert await roles.set_unless_last(POOL.id, A, first, LEASE_MS, {}) is Wished.WISHED

    async def test_a_planner_replaces_no_wish_of_a_person(self, harness: Harness) -> None:
        roles = harness.roles()
        by_hand, planned = WantedRole(Role.PREFILL, OLD), WantedRole(Role.DECODE, OLD, by="planner")
        await roles.set(POOL.id, A, by_hand, LEASE_MS)
        assert await roles.set_unless_last(POOL.id, A, planned, LEASE_MS, {}, term=1) is Wished.HELD
        assert await roles.of(POOL.id, A) == by_hand
        # That was for a start of the worker that is gone; this one lets planners move it again; this one has ended.
        newer = WantedRole(Role.DECODE, NEW, by="planner")
        assert await roles.set_unless_last(POOL.id, A, newer, LEASE_MS, {}, term=1) is Wished.WISHED
        assert await roles.set_unless_last(POOL.id, A, newer, LEASE_MS, {}, term=2) is Wished.WISHED
        await roles.set(POOL.id, B, WantedRole(Role.PREFILL, OLD, by=""), LEASE_MS)
        assert await roles.set_unless_last(POOL.id, B, planned, LEASE_MS, {}, term=1) is Wished.WISHED
        await roles.set(POOL.id, C, by_hand, 40)
        await harness.pass_time(60)
        assert await roles.set_unless_last(POOL.id, C, planned, LEASE_MS, {}, term=1) is Wished.WISHED

    async def test_a_wish_for_an_older_epoch_changes_nothing(self, harness: Harness) -> None:
        roles = harness.roles()
        assert await roles.set(POOL.id, ID, WantedRole(Role.PREFILL, NEW), LEASE_MS)
        assert not await roles.set(POOL.id, ID, WantedRole(Role.DECODE, OLD), LEASE_MS)
        assert not await roles.clear(POOL.id, ID, OLD)
        assert await roles.get(POOL.id) == {ID: WantedRole(Role.PREFILL, NEW)}

    async def test_clear_takes_a_wish_back_and_can_be_repeated(self, harness: Harness) -> None:
        roles = harness.roles()
        assert not await roles.clear(POOL.id, ID, OLD)
        await roles.set(POOL.id, ID, WantedRole(Role.PREFILL, OLD), LEASE_MS)
        assert await roles.clear(POOL.id, ID, OLD)
        assert not await roles.clear(POOL.id, ID, OLD)
        assert await roles.get(POOL.id) == {}

    async def test_a_wish_ends_unless_repeated(self, harness: Harness) -> None:
        roles = harness.roles()
        await roles.set(POOL.id, ID, WantedRole(Role.PREFILL, NEW), 40)
        await roles.set(POOL.id, WorkerId("b:1"), WantedRole(Role.BOTH, OLD), 40)
        await roles.set(POOL.id, WorkerId("b:1"), WantedRole(Role.BOTH, OLD), LEASE_MS)
        await harness.pass_time(60)
        assert await roles.get(POOL.id) == {WorkerId("b:1"): WantedRole(Role.BOTH, OLD)}
        assert await roles.set(POOL.id, ID, WantedRole(Role.DECODE, OLD), LEASE_MS)

    async def test_an_emptied_store_has_no_wishes(self, harness: Harness) -> None:
        roles = harness.roles()
        await roles.set(POOL.id, ID, WantedRole(Role.PREFILL, NEW), LEASE_MS)
        await harness.lose_everything()
        assert await roles.get(POOL.id) == {}
        assert await roles.set(POOL.id, ID, WantedRole(Role.DECODE, OLD), LEASE_MS)

    async def test_close_can_be_repeated(self, harness: Harness) -> None:
        roles = harness.roles()
        await roles.get(POOL.id)
        await roles.close()
        await roles.close()

    @pytest.mark.parametrize("namespace", ["", "a:b"])
    def test_a_namespace_that_cannot_be_part_of_a_key_is_refused(self, harness: Harness, namespace: str) -> None:
        with pytest.raises(ValueError, match="--pd-namespace"):
            harness.roles(namespace)
