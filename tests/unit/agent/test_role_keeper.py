"""What a worker's agent makes of wishes in the store: which it obeys, which it takes back, which it removes."""

from __future__ import annotations

import pytest

from tests.conformance.registry import LEASE_MS, POOL, newer, worker
from vllm_pd.agent.role_keeper import POLL_S, RoleKeeper
from vllm_pd.agent.role_move import SETTLE_S, Seen
from vllm_pd.errors import StoreError
from vllm_pd.state import MemoryRoles, MemoryStore, MoveState, Role, RoleMove, WantedRole, WorkerId, WorkerRecord

RECORD = worker("a:1", role=Role.DECODE)
TIMEOUT_S = 20.0


class Keeping:
    """A keeper with its store, by a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.roles = MemoryRoles("n", MemoryStore(clock=lambda: self.now))
        self.ended: list[RoleMove] = []
        self.away = False
        self.keeper = RoleKeeper(RECORD, self, self.ended.append, lambda: self.now)  # type: ignore[arg-type]

    async def of(self, *args: object) -> WantedRole | None:
        if self.away:
            raise StoreError("The store does not answer; start it.")
        return await self.roles.of(*args)  # type: ignore[arg-type]

    async def clear(self, *args: object) -> bool:
        if self.away:
            raise StoreError("The store does not answer; start it.")
        return await self.roles.clear(*args)  # type: ignore[arg-type]

    async def wish(self, to: Role, id: str = "w1", record: WorkerRecord = RECORD) -> None:
        wanted = WantedRole(to, record.epoch, id, "operator", int(TIMEOUT_S * 1000))
        await self.roles.set(POOL.id, WorkerId("a:1"), wanted, LEASE_MS * 100)

    async def stored(self) -> WantedRole | None:
        return await self.roles.of(POOL.id, WorkerId("a:1"))

    async def ask(self, later_s: float = POLL_S) -> bool:
        self.now += later_s
        return await self.keeper.ask()

    async def drain(self) -> Keeping:
        await self.wish(Role.PREFILL)
        assert not await self.ask()
        assert self.keeper.draining
        self.keeper.told()
        return self


@pytest.fixture
async def keeping() -> Keeping:
    return await Keeping().drain()


async def test_a_wish_is_looked_for_now_and_then_and_obeyed_by_the_start_that_is_meant() -> None:
    keeping = Keeping()
    await keeping.ask()
    await keeping.wish(Role.PREFILL, record=newer(RECORD))
    assert not await keeping.ask()
    assert not keeping.keeper.draining
    await keeping.wish(Role.PREFILL, record=newer(RECORD))
    await keeping.ask(POLL_S / 10)
    assert not keeping.keeper.draining


async def test_a_move_ends_and_its_wish_changes_nothing_more(keeping: Keeping) -> None:
    keeping.now += SETTLE_S
    keeping.keeper.look(Seen())
    record = keeping.keeper.write_into(RECORD)
    assert (record.role, record.role_epoch, [move.state for move in keeping.ended]) == (
        Role.PREFILL,
        1,
        [MoveState.DONE],
    )
    assert not await keeping.ask()
    assert keeping.keeper.write_into(RECORD) == record


async def test_a_wish_that_is_gone_may_have_been_taken_back_unless_the_store_lost_everything(keeping: Keeping) -> None:
    await keeping.roles.clear(POOL.id, RECORD.id, RECORD.epoch)
    keeping.keeper.store_was_empty()
    assert not await keeping.ask()
    await keeping.wish(Role.PREFILL)
    assert not await keeping.ask()
    await keeping.roles.clear(POOL.id, RECORD.id, RECORD.epoch)
    assert await keeping.ask(), "it was seen there since"
    keeping.keeper.taken_back()
    assert [(move.state, move.detail) for move in keeping.ended] == [(MoveState.UNDONE, "the wish was taken back")]


async def test_a_wish_that_could_not_be_fulfilled_is_removed_as_soon_as_the_store_answers(keeping: Keeping) -> None:
    keeping.now += TIMEOUT_S
    keeping.keeper.look(Seen(requests=1))
    assert keeping.ended[-1].state is MoveState.UNDONE
    keeping.away = True
    for _ in range(2):
        with pytest.raises(StoreError):
            await keeping.ask()
    assert await keeping.stored() is not None
    keeping.away = False
    await keeping.ask(0.0)
    assert await keeping.stored() is None
    assert not keeping.keeper.draining


async def test_the_wish_of_somebody_who_asked_meanwhile_is_not_removed_but_obeyed(keeping: Keeping) -> None:
    keeping.now += TIMEOUT_S
    keeping.keeper.look(Seen(requests=1))
    await keeping.wish(Role.BOTH, "w2")
    await keeping.ask()
    stored = await keeping.stored()
    assert stored is not None and stored.id == "w2"
    assert keeping.keeper.write_into(RECORD).role is Role.BOTH


async def test_another_wish_ends_the_move_before_and_both_are_told(keeping: Keeping) -> None:
    await keeping.wish(Role.BOTH, "w2")
    await keeping.ask()
    assert [(move.id, move.state) for move in keeping.ended] == [("w1", MoveState.UNDONE), ("w2", MoveState.DONE)]
