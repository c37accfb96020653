"""What one planner does in situations that each ask for one thing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.unit.planner.toy_world import Load, World
from vllm_pd.errors import SettingsError
from vllm_pd.planner.config import DynamoLoad, PlannerConfig, Rule
from vllm_pd.planner.memory import Memory, decode_memory, encode_memory
from vllm_pd.planner.model import AddAction, Mode, MoveAction, Plan, PoolView, QueueView, RemoveAction, StartView
from vllm_pd.planner.plan import step
from vllm_pd.routing.model import Rates
from vllm_pd.state.base import Epoch, Role

FIXED = PlannerConfig(ttft_s=1.0, itl_s=0.05)
SCALE = replace(FIXED, mode=Mode.SCALE, min_workers=2, max_workers=16)
LONG_PROMPTS = Load(6.0, 5000, 50)
LONG_ANSWERS = Load(6.0, 300, 600)


def steady(load: Load, prefill: int, decode: int, **more: float) -> World:
    return World(lambda _: load, prefill, decode, noise=False, **more)  # type: ignore[arg-type]


def moved(plans: list[Plan]) -> list[MoveAction]:
    return [action for plan in plans for action in plan.actions if isinstance(action, MoveAction)]


def added(plans: list[Plan]) -> int:
    return sum(action.count for plan in plans for action in plan.actions if isinstance(action, AddAction))


# Moves.


def test_long_prompts_bring_workers_to_prefill_and_long_answers_to_decode() -> None:
    for load, to in ((LONG_PROMPTS, Role.PREFILL), (LONG_ANSWERS, Role.DECODE)):
        world = steady(load, 4, 4)
        plans, _ = world.run(FIXED, 12)
        assert moved(plans) and {action.to for action in moved(plans)} == {to}
        acting = next(plan for plan in plans if plan.actions)
        assert f"become {to}" in acting.verdict and "are expected to meet both targets" in acting.verdict


def test_every_step_says_what_it_saw_expected_needs_and_why_nothing_is_done() -> None:
    plans, _ = steady(Load(2.0, 500, 100), 4, 4).run(FIXED, 6)
    said = " ".join(plans[-1].reasons)
    parts = ("requests a second arrived", "TTFT was", "ITL was", "are expected, with", "give or take", "workers busy")
    for part in parts:
        assert part in said
    assert not plans[-1].actions and plans[-1].verdict
    assert plans[-1].numbers["arrivals_per_s"] == pytest.approx(2.0)


def test_a_worker_whose_role_is_held_by_hand_is_neither_moved_nor_removed() -> None:
    world = steady(LONG_PROMPTS, 4, 4)
    for worker in world.workers.values():
        worker.held = worker.role is Role.DECODE
    plans, _ = world.run(FIXED, 12)
    assert not moved(plans) and "held by hand" in plans[-1].verdict
    world = steady(Load(0.0), 4, 4)
    for worker in world.workers.values():
        worker.held = True
    plans, _ = world.run(SCALE, 30)
    assert not any(plan.actions for plan in plans)


def test_the_worker_with_least_to_finish_is_moved() -> None:
    world = steady(LONG_PROMPTS, 4, 4)

    def seen(_: int, view: PoolView) -> PoolView:
        return replace(view, workers=tuple(replace(w, running=0) if w.id == "w7" else w for w in view.workers))

    plans, _ = world.run(FIXED, 6, seen=seen)
    assert moved(plans)[0].worker == "w7"


def test_a_worker_that_did_not_become_what_it_was_asked_to_is_left_alone_for_a_while() -> None:
    world = steady(LONG_PROMPTS, 4, 4, moves_fail=1.0)
    plans, _ = world.run(FIXED, 20)
    asked = [action.worker for action in moved(plans)]
    assert len(asked) == len(set(asked)), "nobody is asked twice within that time"
    assert any("is left alone" in reason for plan in plans for reason in plan.reasons)


def test_a_worker_lost_in_mid_move_is_forgotten_and_its_kind_filled_again() -> None:
    world = steady(LONG_PROMPTS, 4, 4, move_s=60.0)
    _, memory = world.run(FIXED, 4)
    assert len(memory.asked_moves) == 2
    for move in memory.asked_moves:
        del world.workers[move.worker]
    plans, memory = world.run(FIXED, 1, memory)
    assert "is gone or was restarted" in " ".join(plans[0].reasons)
    assert all(move.worker in world.workers for move in memory.asked_moves)


def test_an_empty_kind_is_filled_even_when_nothing_is_known_of_the_traffic() -> None:
    world = steady(LONG_ANSWERS, 4, 1)
    blind = lambda _, view: replace(view, traffic=None)  # noqa: E731
    plans, memory = world.run(FIXED, 3, seen=blind)
    assert not any(plan.actions for plan in plans)
    del world.workers[next(id for id, worker in world.workers.items() if worker.role is Role.DECODE)]
    plans, _ = world.run(FIXED, 1, memory, seen=blind)
    assert [action.to for action in moved(plans)] == [Role.DECODE]


def test_workers_that_do_both_make_up_for_a_missing_kind_and_are_not_moved() -> None:
    world = World(lambda _: LONG_PROMPTS, 1, 2, 5, noise=False)
    plans, _ = world.run(FIXED, 12)
    assert not moved(plans)


# What is not known.


def test_a_first_look_changes_nothing() -> None:
    plans, _ = steady(LONG_PROMPTS, 1, 7).run(FIXED, 2)
    assert not any(plan.actions for plan in plans) and "judged from" in plans[0].verdict


def test_most_workers_vanishing_at_once_is_not_believed_at_once() -> None:
    world = steady(LONG_PROMPTS, 4, 4)
    _, memory = world.run(SCALE, 3)
    few = lambda _, view: replace(view, workers=view.workers[:2])  # noqa: E731
    plans, memory = world.run(SCALE, 2, memory, seen=few)
    assert not any(plan.actions for plan in plans)
    assert "vanished at once" in plans[0].verdict
    plans, _ = world.run(SCALE, 4, memory, seen=few)
    assert added(plans), "after a while it is true"


@pytest.mark.parametrize("jump", [-3600.0, -25.0, 86_400.0])
def test_a_jump_of_the_clock_is_one_step_without_action_and_changes_no_timer(jump: float) -> None:
    world = steady(LONG_PROMPTS, 4, 4)
    plain = steady(LONG_PROMPTS, 4, 4)
    world.run(FIXED, 1)
    moved_at = 2

    def seen(number: int, view: PoolView) -> PoolView:
        return replace(view, at_s=view.at_s + (jump if number >= moved_at else 0.0))

    plans, memory = steady(LONG_PROMPTS, 4, 4).run(FIXED, 10, seen=seen)
    assert not plans[moved_at].actions and "clock" in plans[moved_at].verdict
    _, usual = plain.run(FIXED, 10)
    assert memory.clock == usual.clock
    assert len(moved(plans)) >= 2


def test_while_the_prefill_queue_is_unknown_nobody_leaves_prefill_or_is_taken_away() -> None:
    unread = lambda _, view: replace(view, queue=None, partial="the prefill queue")  # noqa: E731
    known, unknown = steady(LONG_ANSWERS, 6, 2), steady(LONG_ANSWERS, 6, 2)
    known.run(FIXED, 12)
    plans, _ = unknown.run(FIXED, 12, seen=unread)
    assert known.count(Role.PREFILL) < 6 == unknown.count(Role.PREFILL)
    assert "No worker leaves prefill: what waits there is not known." in plans[-1].reasons
    idle = steady(Load(0.5), 4, 4)
    plans, memory = idle.run(SCALE, 40, seen=unread)
    assert len(idle.workers) == 8 and "nobody is taken away" in plans[-1].verdict
    plans, _ = idle.run(SCALE, 40, memory)
    assert len(idle.workers) < 8, "once it is known again"


def test_while_the_prefill_queue_is_unknown_prefill_is_given_what_arrives_by_itself_needs() -> None:
    world = steady(LONG_PROMPTS, 4, 4)
    plans, _ = world.run(FIXED, 12, seen=lambda _, view: replace(view, queue=None))
    assert {action.to for action in moved(plans)} == {Role.PREFILL}


def test_memory_of_another_version_is_a_fresh_one() -> None:
    _, memory = steady(LONG_PROMPTS, 4, 4).run(FIXED, 5)
    assert decode_memory(encode_memory(memory)) == memory
    assert len(encode_memory(memory)) < 20_000
    for data in (None, b"", b"\x00", b"not msgpack", encode_memory(memory)[:-3]):
        assert decode_memory(data) == Memory()


# Scaling.


def test_growing_traffic_starts_workers_before_it_is_too_late_and_idle_ones_go() -> None:
    world = World(lambda t: Load(min(1 + t / 60, 12)), 1, 1, noise=False, start_s=60.0)
    plans, memory = world.run(SCALE, 70)
    assert added(plans) >= 4
    assert world.count(Role.PREFILL) >= 2 and world.count(Role.DECODE) >= 2
    world.load = lambda _: Load(0.0)
    plans, _ = world.run(SCALE, 60, memory)
    assert any(isinstance(action, RemoveAction) for plan in plans for action in plan.actions)
    assert len(world.workers) == SCALE.min_workers


def test_idle_workers_go_by_and_by_so_that_what_is_missed_tells_when_it_was_enough() -> None:
    world = steady(Load(0.2), 8, 8)
    config = replace(SCALE, max_workers=16)
    there = [(0.0, 16)]
    memory, why = Memory(), set[str]()
    for _ in range(120):
        plans, memory = world.run(config, 1, memory)
        there.append((plans[0].at_s, len(world.workers) - sum(isinstance(a, RemoveAction) for a in plans[0].actions)))
        why |= {reason for reason in plans[0].reasons if "no more than one of" in reason}
    assert there[-1][1] == 2, "the last ones go as well"
    for at_s, count in there:
        before = max(others for when, others in there if at_s - config.remove_after_s <= when <= at_s)
        assert before - count <= max(1, before // 4)
    assert "2 workers would be enough, but within 120 s no more than one of 4 goes." in why


@pytest.mark.parametrize(("startup_s", "stays_s"), [(None, 120.0), (20.0, 120.0), (400.0, 400.0)])
def test_workers_stay_as_long_as_the_starts_of_those_that_are_there_took(
    startup_s: float | None, stays_s: float
) -> None:
    """Also before the planner has seen a start of its own."""
    world = steady(Load(0.5, 300, 50), 4, 4, startup_s=startup_s)
    plans, memory = world.run(SCALE, 60)
    gone = next(plan for plan in plans if any(isinstance(action, RemoveAction) for action in plan.actions))
    assert stays_s <= gone.at_s - plans[0].at_s <= stays_s + 60.0
    said = "A start is expected to take 400 s, as those of the workers took that are there."
    assert (said in plans[-1].reasons) is (startup_s == 400.0)
    assert decode_memory(encode_memory(memory)).startup_s == startup_s


def test_a_worker_that_is_started_for_a_kind_is_not_moved_there_as_well() -> None:
    world = steady(Load(10.0, 3000, 200), 2, 3, start_s=20.0)
    plans, _ = world.run(SCALE, 6, Memory(start_s=20.0))
    first = next(plan for plan in plans if plan.actions)
    assert [(each.role, each.count) for each in first.actions if isinstance(each, AddAction)] == [(Role.PREFILL, 2)]
    assert not moved(plans)


@pytest.mark.parametrize(("start_s", "starts"), [(20.0, 2), (300.0, 0)])
def test_where_nobody_may_move_into_a_kind_for_a_while_quick_starts_fill_it(start_s: float, starts: int) -> None:
    """Four that prefill and two that decode are enough together, but the other way round."""
    world = steady(LONG_ANSWERS, 4, 2, start_s=start_s)
    memory = Memory(moved_at=0.0, moved_to=Role.PREFILL, turns=1.0, start_s=start_s)
    plans, _ = world.run(SCALE, 6, memory)
    assert plans[-1].numbers["workers_needed"] <= 6 and not moved(plans)
    assert added(plans) == starts
    if starts:
        acting = next(plan for plan in plans if plan.actions)
        assert "decode lacks workers, and none may move there" in acting.verdict


def test_an_unreachable_target_does_not_start_ever_more_workers() -> None:
    """A single prompt takes 50 ms: no number of workers gives a first token within 10 ms."""
    load = Load(2.0, 300, 50)
    modest, greedy = steady(load, 2, 2), steady(load, 2, 2)
    modest.run(SCALE, 40)
    plans, _ = greedy.run(replace(SCALE, ttft_s=0.01, itl_s=0.001), 40)
    assert any("out of reach" in reason for reason in plans[-1].reasons)
    assert len(greedy.workers) + len(greedy.starting) <= 8
    late = [plan for plan in plans[25:] if any(isinstance(action, AddAction) for action in plan.actions)]
    assert not late


def test_workers_that_do_not_come_up_are_given_up_and_tried_again_ever_more_seldom_one_at_a_time() -> None:
    config = replace(SCALE, start_deadline_s=100.0)
    world = World(lambda _: Load(12.0), 1, 1, noise=False, starts_fail=1.0)
    plans, memory = world.run(config, 100)
    assert world.given_up and memory.failed_starts >= 2
    tries = [plan.at_s for plan in plans if any(isinstance(action, AddAction) for action in plan.actions)]
    first = next(plan for plan in plans if plan.give_up).at_s
    later = [at for at in tries if at > first]
    assert later and later[0] - first >= 100.0
    assert all(gap >= 200.0 for gap in map(lambda a, b: b - a, later, later[1:]))
    assert any("did not come up" in reason for plan in plans for reason in plan.reasons)
    after = [plan for plan in plans if plan.at_s > first and plan.actions]
    assert all(action.count == 1 for plan in after for action in plan.actions if isinstance(action, AddAction))


def test_starts_that_somebody_else_asked_for_are_counted_and_after_the_deadline_not() -> None:
    world = World(lambda _: Load(9.0), 2, 2, noise=False)
    waited = [0.0]

    def seen(_: int, view: PoolView) -> PoolView:
        waited[0] += 10.0
        return replace(view, starts=(StartView(Role.PREFILL, 6, waited[0]), StartView(Role.DECODE, 6, waited[0])))

    config = replace(SCALE, start_deadline_s=200.0)
    plans, memory = world.run(config, 15, seen=seen)
    assert not added(plans) and not any(plan.give_up for plan in plans)
    plans, _ = world.run(config, 15, memory, seen=seen)
    assert added(plans)


def test_workers_added_by_hand_are_adopted_and_not_taken_away_at_once() -> None:
    world = steady(Load(1.0), 1, 1)
    _, memory = world.run(SCALE, 20)
    for _ in range(4):
        world.add(Role.DECODE)
    plans, memory = world.run(SCALE, 10, memory)
    assert "were not asked for" in " ".join(plans[0].reasons)
    assert not any(isinstance(action, RemoveAction) for plan in plans for action in plan.actions)
    plans, _ = world.run(SCALE, 20, memory)
    assert any(isinstance(action, RemoveAction) for plan in plans for action in plan.actions)


def test_workers_taken_away_by_hand_are_started_again_only_as_needed() -> None:
    world = steady(Load(9.0), 3, 4)
    _, memory = world.run(SCALE, 10)
    for name in [id for id, worker in world.workers.items() if worker.role is Role.DECODE][:2]:
        del world.workers[name]
    plans, _ = world.run(SCALE, 20, memory)
    assert added(plans)
    assert world.count(Role.DECODE) >= 3


def test_how_long_starts_and_moves_take_is_learned() -> None:
    world = World(lambda _: LONG_PROMPTS, 1, 3, noise=False, start_s=145.0, move_s=25.0)
    _, memory = world.run(SCALE, 60)
    assert memory.start_s == pytest.approx(145.0, abs=15.0)
    assert memory.move_s == pytest.approx(25.0, abs=10.0)


# The rule of Dynamo's first planner.


def thirty_seconds(view: PoolView, queue: tuple[int, ...], kv: float, config: PlannerConfig, memory: Memory) -> Plan:
    """The plan after an interval in which so many requests waited for prefill."""
    plan = Plan(0.0)
    for waiting in queue:
        view = replace(
            view,
            at_s=view.at_s + 10.0,
            queue=QueueView(waiting, waiting * 1000),
            workers=tuple(replace(w, kv_usage=kv, waiting=0) for w in view.workers),
        )
        plan, memory = step(view, memory, config)
    return plan


@pytest.mark.parametrize(
    ("queue", "kv", "wanted"),
    [
        ((0, 0, 0, 0, 0, 0), 0.7, "-P"),
        ((1, 1, 1, 1, 1, 1), 0.7, "+P"),
        ((9, 6, 3, 2, 1, 0), 0.7, ""),
        ((1, 0, 1, 0, 1, 0), 0.7, ""),
        ((1, 0, 0, 1, 0, 1), 0.4, "-D"),
        ((1, 0, 1, 0, 1, 0), 0.95, "+D"),
        ((1, 1, 1, 1, 1, 1), 0.95, "+P+D"),
        ((0, 0, 0, 0, 0, 0), 0.3, "-P-D"),
        ((0, 0, 0, 0, 0, 0), 0.5, "-P"),
        ((1, 0, 1, 0, 1, 0), 0.9, ""),
    ],
)
def test_the_load_rule_compares_as_dynamo_does(queue: tuple[int, ...], kv: float, wanted: str) -> None:
    config = replace(SCALE, rule=Rule.DYNAMO_LOAD, dynamo=DynamoLoad(adjustment_interval_s=60.0), max_changes=4)
    view = steady(Load(3.0), 3, 3).view(10.0)
    _, memory = step(view, Memory(), config)
    for _ in range(2):
        view = replace(view, at_s=view.at_s + 10.0)
        _, memory = step(view, memory, config)
    memory = replace(memory, tally=type(memory.tally)(since=memory.clock))
    plan = thirty_seconds(view, queue, kv, config, memory)
    did = ""
    for action in plan.actions:
        if isinstance(action, AddAction):
            did += f"+{action.role[0].upper()}"
        elif isinstance(action, RemoveAction):
            role = next(w.role for w in view.workers if w.id == action.worker)
            did += f"-{role[0].upper()}"
    assert did == wanted, plan


def test_the_load_rule_moves_where_the_total_is_fixed() -> None:
    config = replace(FIXED, rule=Rule.DYNAMO_LOAD)
    view = steady(Load(3.0), 3, 3).view(10.0)
    _, memory = step(view, Memory(), config)
    plan = thirty_seconds(view, (5,) * 6, 0.2, config, memory)
    assert not plan.actions or [action.to for action in moved([plan])] == [Role.PREFILL]


# Settings.


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttft_s": 0.0},
        {"itl_s": -1.0},
        {"interval_s": math.nan},
        {"attainment": 1.0},
        {"worth": 0.0},
        {"max_changes": 0},
        {"min_workers": 5, "max_workers": 4},
        {"min_workers": 0},
        {"dynamo": DynamoLoad(adjustment_interval_s=math.inf)},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=r"\.$"):
        PlannerConfig(**wrong)  # type: ignore[arg-type]


def test_rates_of_nothing_and_a_worker_without_capacity_do_no_harm() -> None:
    world = steady(Load(3.0), 2, 2)
    odd = Rates(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    plans, _ = world.run(SCALE, 10, seen=lambda _, view: replace(view, rates=odd, kv_tokens=0))
    assert all(math.isfinite(number) for plan in plans for number in plan.numbers.values())


def test_an_epoch_goes_with_every_action() -> None:
    world = steady(LONG_PROMPTS, 4, 4)
    for worker in world.workers.values():
        worker.epoch = Epoch(1234)
    plans, _ = world.run(FIXED, 6)
    assert {action.epoch for action in moved(plans)} == {Epoch(1234)}
