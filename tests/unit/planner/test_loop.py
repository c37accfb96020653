"""Look, decide, write down, act: with other planners, deaths, outages and clocks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.conformance.registry import OTHER_POOL, POOL
from tests.unit.planner.loop_world import LEASE_S, LONG_MS, MOVE, Script, World, unknown, worker
from vllm_pd.planner.actuator import Outcome
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.memory import Memory, decode_memory
from vllm_pd.planner.model import Action, AddAction, GiveUp, MoveAction, Plan, PoolView
from vllm_pd.planner.service import PlannerService
from vllm_pd.planner.settings import PlannerSettings
from vllm_pd.state import Epoch, Role, WorkerId
from vllm_pd.state.memory_planner_board import MemoryPlannerBoard
from vllm_pd.state.open_registry import open_planner_board, open_registry

SECOND_MOVE = MoveAction(WorkerId("w2:1"), Epoch(1), Role.DECODE, "a test wants it too")


@pytest.fixture
async def world() -> World:
    return await World().start()


async def test_what_is_decided_is_done_once_and_explained(world: World) -> None:
    one = world.planner("one", Script(MOVE))
    await one.round()
    assert one.actuator.asked == [MOVE]
    step = await one.newest()
    assert (step.planner, step.kind, step.verdict, step.reasons) == ("one", "changes", "1 changes.", ("A reason.",))
    ((did, detail, why),) = [(each.did, each.detail, each.why) for each in step.done]
    assert (did, detail, why) == ("begun", "", MOVE.why)
    world.now += 5
    await one.round()
    assert one.actuator.asked == [MOVE]
    assert [each.verdict for each in await one.journal()] == ["1 changes.", "As it is."]
    assert one.metric("steps_total", pool=POOL.id, verdict="changes") == 1
    assert one.metric("actions_total", pool=POOL.id, action="move", role="decode", outcome="begun") == 1
    assert one.metric("workers", pool=POOL.id, role="prefill") == 2
    assert one.metric("estimate", pool=POOL.id, name="load") == 0.5


async def test_of_two_planners_one_decides(world: World) -> None:
    script = Script(MOVE)
    one, other = world.planner("one", script), world.planner("other", script)
    for _ in range(10):
        await asyncio.gather(one.round(), other.round())
        world.now += 5
    assert one.actuator.asked + other.actuator.asked == [MOVE]
    assert sorted([one.metric("leader", pool=POOL.id), other.metric("leader", pool=POOL.id)]) == [0, 1]  # type: ignore[type-var]
    follower = one if one.metric("leader", pool=POOL.id) == 0 else other
    assert follower.metric("workers", pool=POOL.id, role="prefill") is None


async def test_after_a_death_the_other_goes_on_with_the_memory_of_the_first(world: World) -> None:
    script = Script(MOVE)
    one, other = world.planner("one", script), world.planner("other", script)
    await one.round()
    await other.round()
    world.now += LEASE_S - 1
    await other.round()
    assert other.metric("leader", pool=POOL.id) == 0
    world.now += 1.5
    await other.round()
    assert other.metric("leader", pool=POOL.id) == 1
    assert [each.worker for each in script.memories[-1].asked_moves] == [MOVE.worker]
    assert other.actuator.asked == []
    assert (await other.newest()).planner == "other"


async def test_one_that_is_stopped_lets_the_other_lead_at_once(world: World) -> None:
    one, other = world.planner("one", Script()), world.planner("other", Script())
    await one.round()
    await one.leadership.resign()
    await other.round()
    assert other.metric("leader", pool=POOL.id) == 1


async def test_a_planner_that_dies_while_it_acts_leaves_behind_what_it_was_at(world: World) -> None:
    one, other = world.planner("one", Script(MOVE)), world.planner("other", Script(MOVE))

    async def die(action: Action) -> Outcome | None:
        raise asyncio.CancelledError

    one.actuator.before = die
    with pytest.raises(asyncio.CancelledError):
        await one.round()
    world.now += LEASE_S + 1
    await other.round()
    assert other.actuator.asked == []
    first, second = await other.journal()
    assert (first.planner, first.is_open, [each.worker for each in first.done]) == ("one", True, ["w1:1"])
    assert second.planner == "other"


async def test_a_planner_that_stood_still_begins_nothing_more(world: World) -> None:
    one, other = world.planner("one", Script(MOVE, SECOND_MOVE)), world.planner("other", Script())

    async def stand_still(action: Action) -> Outcome | None:
        world.now += LEASE_S + 1
        await other.round()
        return None

    one.actuator.before = stand_still
    await one.round()
    assert one.actuator.asked == [MOVE]
    assert one.metric("leader", pool=POOL.id) == 0
    assert one.metric("actions_total", pool=POOL.id, action="move", role="decode", outcome="lost") == 1
    # Of the second move it is not known there that it was not begun; the next looks show it.
    assert (await other.newest()).planner == "other"
    one.actuator.before = None
    await one.round()
    assert one.actuator.asked == [MOVE]


async def test_a_dry_run_says_what_it_would_do_and_touches_nothing(world: World) -> None:
    real, dry = world.planner("real", Script()), world.planner("dry", Script(MOVE), dry_run=True)
    for _ in range(3):
        await real.round()
        await dry.round()
        world.now += 5
    assert dry.actuator.asked == []
    assert await world.roles.get(POOL.id) == {}
    assert real.metric("leader", pool=POOL.id) == 1
    steps = await dry.journal()
    assert [each.done[0].did for each in steps] == ["dry_run"] * 3
    assert all(each.dry_run for each in steps)
    assert all(not each.dry_run for each in await real.journal())


async def test_what_was_refused_is_told_and_not_waited_for(world: World) -> None:
    one = world.planner("one", Script(MOVE))

    async def refuse(action: Action) -> Outcome | None:
        return Outcome(False, "It is held by hand.")

    one.actuator.before = refuse
    await one.round()
    (done,) = (await one.newest()).done
    assert (done.did, done.detail) == ("refused", "It is held by hand.")
    memory = decode_memory(await one.board.memory(POOL.id))
    assert memory.asked_moves == ()
    assert [each.worker for each in memory.refused] == [MOVE.worker]


async def test_an_actuator_that_does_not_answer_leaves_the_outcome_open(world: World) -> None:
    one = world.planner("one", Script(MOVE))
    one.actuator.before = unknown
    await one.round()
    (done,) = (await one.newest()).done
    assert (done.did, done.detail) == ("unknown", "The machine room does not answer; walk there.")
    assert len(decode_memory(await one.board.memory(POOL.id)).asked_moves) == 1
    one.actuator.before = None
    await one.round()
    assert one.actuator.asked == [MOVE]


async def test_an_actuator_that_fails_as_nobody_foresaw_may_have_done_it_all_the_same(world: World) -> None:
    one = world.planner("one", Script(MOVE, plan=None))

    async def fail(action: Action) -> Outcome | None:
        raise KeyError("a reply of another version")

    one.actuator.before = fail
    await one.round()
    (done,) = (await one.newest()).done
    assert done.did == "unknown" and "a reply of another version" in done.detail
    world.now += 5
    await one.round()
    assert one.actuator.asked == [MOVE], "it is not done once more"


async def test_what_came_of_a_step_is_told_though_the_store_was_away_when_it_was_known(world: World) -> None:
    one = world.planner("one", Script(MOVE))

    async def lose_the_store(action: Action) -> Outcome | None:
        world.away = True
        return None

    one.actuator.before = lose_the_store
    await one.round()
    world.away = False
    world.now += 1
    await one.round()
    told = [each for each in await one.journal() if each.done]
    assert [[each.did for each in step.done] for step in told] == [["begun"]]


async def test_an_error_is_logged_again_once_it_was_gone(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.planner("one", Script())
    pools = one.loop._observer.pools
    rounds = iter((True, True, False, True))

    async def observe() -> object:
        if next(rounds):
            raise ZeroDivisionError
        return await pools()

    monkeypatch.setattr(one.loop._observer, "pools", observe)
    for _ in range(4):
        await one.loop.guarded_round()
        world.now += 5
    assert len([record for record in caplog.records if record.exc_info]) == 2


async def test_a_leadership_that_ran_out_is_not_shown_whatever_the_step_is_at(world: World) -> None:
    one = world.planner("one", Script(MOVE))
    await one.round()
    assert one.metric("leader", pool=POOL.id) == 1
    world.now += LEASE_S + 1
    assert one.metric("leader", pool=POOL.id) == 0
    assert one.metric("workers", pool=POOL.id, role="prefill") is None


async def test_a_planner_that_is_stopped_again_and_again_lets_others_lead_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"memory://{world.now}"
    service = PlannerService(PlannerSettings(store=store, namespace="n"))
    registry, board = open_registry(store, "n"), open_planner_board(store, "n")
    await registry.heartbeat(worker("w1:1", Role.BOTH), LONG_MS)
    resign = MemoryPlannerBoard.resign

    async def slowly(self: MemoryPlannerBoard, *args: Any) -> bool:
        await asyncio.sleep(0.3)
        return await resign(self, *args)

    monkeypatch.setattr(MemoryPlannerBoard, "resign", slowly)
    await service._leadership.stand(POOL.id)
    service.start()
    await asyncio.sleep(0)
    assert await board.leader(POOL.id) is not None
    await service.stop()
    assert await board.leader(POOL.id) is None


async def test_what_nobody_can_do_is_said(world: World) -> None:
    add = AddAction(Role.DECODE, 1, "too few")
    one = world.planner("one", Script(add))
    one.actuator.able = False
    await one.round()
    (done,) = (await one.newest()).done
    assert (done.did, done.detail) == ("impossible", "This notebook cannot do that.")


async def test_what_did_not_come_up_is_given_up_through_the_actuator(world: World) -> None:
    plan = Plan(0.0, (), (GiveUp(Role.DECODE, 2, "too late"),), "Two are given up.")
    one = world.planner("one", Script(plan=plan))
    await one.round()
    assert one.actuator.given_up == [(Role.DECODE, 2)]
    assert one.metric("actions_total", pool=POOL.id, action="give_up", role="decode", outcome="begun") == 1


async def test_while_the_store_is_away_nothing_is_decided_and_after_a_while_workers_may_settle(world: World) -> None:
    one = world.planner("one", Script(MOVE))
    world.away = True
    for _ in range(3):
        await one.round()
        world.now += 5
    assert one.actuator.asked == []
    assert one.metric("store_up") == 0
    world.away = False
    await one.round()
    assert one.actuator.asked == []
    assert "the store came back" in (await one.newest()).verdict
    assert one.metric("store_up") == 1
    assert one.metric("steps_total", pool=POOL.id, verdict="blind") == 1
    world.now += 21
    await one.round()
    assert one.actuator.asked == [MOVE]


async def test_a_leader_does_not_act_on_a_leadership_that_it_cannot_renew(world: World) -> None:
    one = world.planner("one", Script())
    await one.round()
    world.away = True
    world.now += LEASE_S
    await one.round()
    assert one.metric("leader", pool=POOL.id) == 0


async def test_a_store_that_lost_everything_is_not_believed_at_once(world: World) -> None:
    script = Script()
    one = world.planner("one", script)
    await one.round()
    world.store.clear()
    world.now += 2
    await world.join(worker("w1:1", Role.PREFILL))
    script.actions = (MOVE,)
    await one.round()
    world.now += 5
    await one.round()
    assert one.actuator.asked == []
    assert "lost what it held" in (await one.newest()).verdict
    world.now += 21
    await one.round()
    assert one.actuator.asked == [MOVE]


async def test_every_pool_is_planned_on_its_own_and_one_that_fails_costs_only_its_own_step(world: World) -> None:
    await world.join(worker("o1:1", Role.BOTH, OTHER_POOL))
    script = Script(MOVE)

    def decide(view: PoolView, memory: Memory, config: PlannerConfig) -> tuple[Plan, Memory]:
        if view.pool == OTHER_POOL.id:
            raise ZeroDivisionError
        return script(view, memory, config)

    one = world.planner("one", decide)
    await one.round()
    assert one.actuator.asked == [MOVE]
    assert [each.id for each in script.views[0].workers] == ["w1:1", "w2:1", "w3:1", "w4:1"]
    with pytest.raises(ValueError, match="not enough values"):
        await one.newest(OTHER_POOL.id)


async def test_a_pool_without_workers_is_forgotten(world: World) -> None:
    one = world.planner("one", Script())
    await one.round()
    for n in range(1, 5):
        await world.registry.withdraw(WorkerId(f"w{n}:1"), POOL.id, Epoch(1))
    await world.join(worker("o1:1", Role.BOTH, OTHER_POOL))
    await one.round()
    assert list(one.statuses) == [OTHER_POOL.id]


async def test_the_store_s_clock_is_the_time_of_all_steps_whatever_it_does(world: World) -> None:
    script = Script()
    one = world.planner("one", script)
    for jump in (0, 3600, -7200, 0):
        world.now += jump
        await one.round()
        world.now += 5
    times = [view.at_s for view in script.views]
    assert times[0] == 1_000_000.0
    assert len(times) >= 3


async def test_the_real_core_holds_still_on_what_it_does_not_know(world: World) -> None:
    from vllm_pd.planner.plan import step

    one = world.planner("one", step)
    for _ in range(5):
        await one.round()
        world.now += 5
    assert one.actuator.asked == []
    newest = await one.newest()
    assert (newest.kind, newest.verdict) == ("blind", "Nothing is changed: what arrived is not known.")
    assert one.metric("steps_total", pool=POOL.id, verdict="blind") == 5
