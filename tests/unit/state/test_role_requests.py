"""Asking for a role: what is wished, refused and waited for, on a store in memory."""

from __future__ import annotations

import dataclasses

import pytest

from tests.conformance.registry import LEASE_MS, POOL, newer, worker
from vllm_pd.errors import SettingsError
from vllm_pd.planner.model import PLANNER
from vllm_pd.roles import Asked, Verdict, is_held, request_move, take_back, wait_for_move
from vllm_pd.state import (
    MemoryRegistry,
    MemoryRoles,
    MemoryStore,
    MoveState,
    Role,
    RoleMove,
    WantedRole,
    WorkerId,
    WorkerRecord,
)
from vllm_pd.state.memory_planner_board import MemoryPlannerBoard

A, B, C = "a:1", "b:1", "c:1"
PREFILL, DECODE, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH


class Cluster:
    def __init__(self) -> None:
        store = MemoryStore()
        self.store = store
        self.registry = MemoryRegistry("n", store)
        self.roles = MemoryRoles("n", store)

    async def add(self, *records: WorkerRecord) -> None:
        for record in records:
            await self.registry.heartbeat(record, LEASE_MS)

    async def ask(self, name: str, to: Role | None, **more: object) -> Asked:
        return await request_move(self.registry, self.roles, name, to, **more)  # type: ignore[arg-type]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def moved(record: WorkerRecord, to: Role, state: MoveState, by: str, id: str = "m") -> WorkerRecord:
    return dataclasses.replace(record, move=RoleMove(id, to, by, state, 0))


async def test_a_wish_says_who_wants_what_of_which_start_and_for_how_long(cluster: Cluster) -> None:
    await cluster.add(worker(A, role=DECODE), worker(B, role=DECODE))
    asked = await cluster.ask("http://a:1/", PREFILL, by="somebody", timeout_s=12.5)
    assert asked.verdict is Verdict.ASKED and asked.ok and asked.wish is not None
    assert await cluster.roles.of(POOL.id, WorkerId(A)) == asked.wish
    assert dataclasses.replace(asked.wish, id="") == WantedRole(PREFILL, worker().epoch, "", "somebody", 12_500)
    again = await cluster.ask(A, PREFILL, by="somebody")
    assert (again.verdict, again.wish) == (Verdict.ALREADY, asked.wish)
    other = await cluster.ask(A, BOTH)
    assert other.verdict is Verdict.ASKED and other.wish != asked.wish
    assert asked.record is not None
    assert not await take_back(cluster.roles, asked.record, asked.wish), "it was replaced"
    assert other.wish is not None and await take_back(cluster.roles, asked.record, other.wish)


async def test_who_is_not_there_is_not_asked(cluster: Cluster) -> None:
    await cluster.add(worker("host-1:8000"))
    asked = await cluster.ask("host-1:800", PREFILL)
    assert asked.verdict is Verdict.UNKNOWN and "host-1:8000" in asked.detail
    assert (await cluster.ask("host-1:8000", BOTH, epoch=newer(worker()).epoch)).verdict is Verdict.UNKNOWN
    for wrong in ({"timeout_s": -1}, {"timeout_s": 1e9}, {"by": "a:b"}):
        with pytest.raises(SettingsError):
            await cluster.ask("host-1:8000", BOTH, **wrong)


async def test_one_without_nixl_cannot_prefill_for_others_and_is_none_that_does(cluster: Cluster) -> None:
    off = {"nixl_host": ""}
    await cluster.add(dataclasses.replace(worker(A, role=BOTH), **off), worker(B, role=BOTH), worker(C, role=DECODE))
    assert (await cluster.ask(A, PREFILL)).verdict is Verdict.UNABLE
    assert (await cluster.ask(B, DECODE)).verdict is Verdict.LAST
    assert (await cluster.ask(A, DECODE)).verdict is Verdict.ASKED


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        (worker(B, role=DECODE), Verdict.ASKED),
        (worker(B, role=BOTH), Verdict.ASKED),
        (worker(B, role=PREFILL), Verdict.LAST),
        (moved(worker(B, role=DECODE), PREFILL, MoveState.DRAINING, "x"), Verdict.LAST),
        (moved(worker(B, role=DECODE), BOTH, MoveState.DRAINING, "x"), Verdict.ASKED),
        (moved(worker(B, role=DECODE), PREFILL, MoveState.UNDONE, "x"), Verdict.ASKED),
        (moved(worker(B, role=PREFILL), DECODE, MoveState.DRAINING, "x"), Verdict.LAST),
    ],
)
async def test_the_last_who_decodes_stays(cluster: Cluster, other: WorkerRecord, verdict: Verdict) -> None:
    await cluster.add(worker(A, role=DECODE), other)
    asked = await cluster.ask(A, PREFILL)
    assert asked.verdict is verdict
    if verdict is Verdict.LAST:
        assert "decodes" in asked.detail and await cluster.roles.of(POOL.id, WorkerId(A)) is None
        assert (await cluster.ask(A, PREFILL, force=True)).verdict is Verdict.ASKED


async def test_a_role_asked_for_by_hand_is_held_until_that_is_taken_back(cluster: Cluster) -> None:
    record = worker(A, role=DECODE)
    await cluster.add(record, worker(B, role=DECODE))
    assert not is_held(record)
    assert (await cluster.ask(A, DECODE, by=PLANNER)).verdict is Verdict.ALREADY
    held = await cluster.ask(A, DECODE)
    assert held.verdict is Verdict.ASKED, "it is to be told that it is held"
    for state in MoveState:
        await cluster.add(moved(record, DECODE, state, "operator"))
        assert (await cluster.ask(A, PREFILL, by=PLANNER)).verdict is Verdict.HELD
    free = await cluster.ask(A, None)
    assert free.verdict is Verdict.ASKED and free.wish is not None and (free.wish.role, free.wish.by) == (DECODE, "")
    await cluster.add(moved(record, DECODE, MoveState.DONE, "", free.wish.id))
    assert (await cluster.ask(A, None)).verdict is Verdict.ALREADY
    assert (await cluster.ask(A, PREFILL, by=PLANNER)).verdict is Verdict.ASKED


async def test_a_planner_does_not_replace_what_a_person_wished_a_moment_ago(cluster: Cluster) -> None:
    await cluster.add(worker(A, role=DECODE), worker(B, role=DECODE))
    by_hand = await cluster.ask(A, PREFILL)
    for to in (BOTH, PREFILL):
        asked = await cluster.ask(A, to, by=PLANNER)
        assert (asked.verdict, asked.ok) == (Verdict.HELD, False), "the worker has not even seen the wish yet"
    assert await cluster.roles.of(POOL.id, WorkerId(A)) == by_hand.wish
    assert (await cluster.ask(A, None)).verdict is Verdict.ASKED
    assert (await cluster.ask(A, BOTH, by=PLANNER)).verdict is Verdict.ASKED


async def test_a_planner_that_does_not_lead_any_more_is_refused(cluster: Cluster) -> None:
    await cluster.add(worker(A, role=DECODE), worker(B, role=DECODE))
    term = (await MemoryPlannerBoard("n", cluster.store).lead(POOL.id, "new", LEASE_MS)).term
    asked = await cluster.ask(A, PREFILL, by=PLANNER, term=term - 1)
    assert asked.verdict is Verdict.DEPOSED and "planner" in asked.detail
    assert await cluster.roles.of(POOL.id, WorkerId(A)) is None
    assert (await cluster.ask(A, PREFILL, by=PLANNER, term=term)).verdict is Verdict.ASKED
    assert (await cluster.ask(A, DECODE)).verdict is Verdict.ASKED, "people need no term"


async def test_a_move_under_way_may_be_let_go_though_nobody_else_is_left(cluster: Cluster) -> None:
    drains = moved(worker(A, role=DECODE), PREFILL, MoveState.DRAINING, "operator")
    await cluster.add(drains, worker(B, role=PREFILL))
    assert (await cluster.ask(A, PREFILL, by="somebody")).verdict is Verdict.LAST, "nobody wishes it any more"
    await cluster.roles.set(POOL.id, WorkerId(A), WantedRole(PREFILL, drains.epoch, "m"), LEASE_MS)
    assert (await cluster.ask(A, None)).verdict is Verdict.ASKED
    assert (await cluster.ask(A, PREFILL, by="somebody")).verdict is Verdict.ASKED


async def test_who_waits_is_told_that_another_wish_was_obeyed_instead(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = worker(A, role=DECODE)
    await cluster.add(record, worker(B, role=DECODE))
    asked = await cluster.ask(A, PREFILL, timeout_s=0.01)
    await cluster.add(moved(record, BOTH, MoveState.DONE, "somebody", "other"))
    monkeypatch.setattr("vllm_pd.roles._TAKE_UP_S", 0.01)
    assert asked.wish is not None
    ended = await wait_for_move(cluster.registry, record, asked.wish)
    assert not ended.done and "another wish" in ended.detail.lower() and "somebody" in ended.detail


async def test_the_end_is_what_the_worker_tells(cluster: Cluster) -> None:
    record = worker(A, role=DECODE)
    await cluster.add(record, worker(B, role=DECODE))
    asked = await cluster.ask(A, PREFILL)
    assert asked.wish is not None
    for state, done in ((MoveState.DONE, True), (MoveState.UNDONE, False)):
        await cluster.add(moved(record, PREFILL, state, "operator", asked.wish.id))
        assert (await wait_for_move(cluster.registry, record, asked.wish)).done is done
    await cluster.add(newer(record))
    ended = await wait_for_move(cluster.registry, record, asked.wish)
    assert not ended.done and "started anew" in ended.detail
