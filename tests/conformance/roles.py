"""What every `Roles` must do. A test module subclasses it; `harness` is a fixture."""

from __future__ import annotations

import pytest

from tests.conformance.harness import Harness
from tests.conformance.registry import LEASE_MS, OTHER_POOL, POOL
from vllm_pd.state import Epoch, Role, WantedRole, WorkerId

ID = WorkerId("[::1]:8000")
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
