"""The planner over generated histories: whatever comes, it does not crash, swing to and fro, or empty a kind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.planner.toy_world import POOL, Load, World
from vllm_pd.planner.config import PlannerConfig, Rule
from vllm_pd.planner.memory import Memory
from vllm_pd.planner.model import AddAction, Mode, MoveAction, Plan, PoolView, QueueView, RemoveAction, Traffic
from vllm_pd.planner.plan import step
from vllm_pd.state.base import Epoch, Role, WorkerId

FIXED = PlannerConfig(ttft_s=1.0, itl_s=0.05)
SCALE = replace(FIXED, mode=Mode.SCALE, min_workers=2, max_workers=16)

PATTERNS: dict[str, Callable[[float, float], Load]] = {
    "idle": lambda size, t: Load(0.0),
    "steady": lambda size, t: Load(6 * size),
    "step up": lambda size, t: Load((3 if t < 300 else 9) * size),
    "step down": lambda size, t: Load((9 if t < 300 else 2) * size),
    "sinusoid": lambda size, t: Load(6 * size * (1 + 0.5 * math.sin(t / 100))),
    "spike": lambda size, t: Load((30 if 300 <= t < 340 else 4) * size),
    "shifting mix": lambda size, t: Load(5 * size, 2500 + 2000 * math.sin(t / 150), 350 - 250 * math.sin(t / 150)),
    "comes and goes": lambda size, t: Load(8 * size if int(t / 60) % 2 else 0.0),
    "far too much": lambda size, t: Load(200 * size),
}

histories = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def holds(config: PlannerConfig) -> Callable[[PoolView, Plan, World], None]:
    """What is true of every plan."""

    def check(view: PoolView, plan: Plan, world: World) -> None:
        assert plan.verdict.endswith(".") and len(plan.verdict) > 10
        assert all(sentence and sentence.endswith(".") for sentence in plan.reasons)
        assert "nan" not in " ".join(plan.reasons) and "inf " not in " ".join(plan.reasons)
        assert all(math.isfinite(number) for number in plan.numbers.values())
        there = {worker.id: worker for worker in view.workers}
        changed: set[WorkerId] = set()
        for action in plan.actions:
            assert action.why
            if isinstance(action, AddAction):
                assert config.mode is Mode.SCALE and action.count > 0
                continue
            worker = there[action.worker]
            assert worker.is_settled and not worker.is_held and action.epoch == worker.epoch
            assert worker.id not in changed
            changed.add(worker.id)
            assert isinstance(action, MoveAction) or config.mode is Mode.SCALE
        under_way = sum(not worker.is_settled for worker in view.workers)
        if changed:
            assert under_way + len(changed) <= config.max_changes
        if not any(worker.role is Role.BOTH for worker in view.workers):
            for role in (Role.PREFILL, Role.DECODE):
                settled = [worker.id for worker in view.workers if worker.role is role and worker.is_settled]
                assert not settled or set(settled) - changed, "the last of a kind"
        added = sum(action.count for action in plan.actions if isinstance(action, AddAction))
        if added:
            assert len(view.workers) + sum(start.count for start in view.starts) + added <= config.max_workers

    return check


@histories
@given(
    pattern=st.sampled_from(sorted(PATTERNS)),
    size=st.sampled_from((0.1, 0.5, 1.0, 2.0)),
    prefill=st.integers(1, 8),
    decode=st.integers(1, 8),
    both=st.sampled_from((0, 0, 0, 1, 3)),
    scale=st.booleans(),
    rule=st.sampled_from((Rule.SLA, Rule.SLA, Rule.DYNAMO_LOAD)),
    move_s=st.sampled_from((0.0, 5.0, 25.0, 90.0)),
    start_s=st.sampled_from((10.0, 60.0, 300.0)),
    moves_fail=st.sampled_from((0.0, 0.5, 1.0)),
    starts_fail=st.sampled_from((0.0, 0.5, 1.0)),
    seed=st.integers(0, 1000),
)
def test_every_plan_of_any_history_can_be_carried_out_and_empties_no_kind(
    pattern: str,
    size: float,
    prefill: int,
    decode: int,
    both: int,
    scale: bool,
    rule: Rule,
    move_s: float,
    start_s: float,
    moves_fail: float,
    starts_fail: float,
    seed: int,
) -> None:
    config = replace(SCALE if scale else FIXED, rule=rule)
    world = World(
        lambda t: PATTERNS[pattern](size, t),
        prefill,
        decode,
        both,
        move_s=move_s,
        start_s=start_s,
        moves_fail=moves_fail,
        starts_fail=starts_fail,
        seed=seed,
    )
    world.run(config, 45, check=holds(config))


@histories
@given(data=st.data(), scale=st.booleans(), seed=st.integers(0, 1000))
def test_whatever_is_missing_old_or_odd_in_a_view_the_plan_is_sound(
    data: st.DataObject, scale: bool, seed: int
) -> None:
    config = SCALE if scale else FIXED
    chance = random.Random(seed)
    world = World(lambda t: PATTERNS["sinusoid"](1.0, t), 3, 5, seed=seed)
    faults = data.draw(st.lists(st.sampled_from(sorted(FAULTS)), min_size=1, max_size=3, unique=True))

    def seen(number: int, view: PoolView) -> PoolView:
        for fault in faults:
            if chance.random() < 0.4:
                view = FAULTS[fault](view, chance)
        return view

    def check(view: PoolView, plan: Plan, world: World) -> None:
        holds(config)(view, plan, world)
        if view.age_s > config.stale_s or not view.workers:
            assert not plan.actions
        if view.traffic is None or view.traffic.age_s > config.stale_s or view.rates is None:
            assert not plan.actions

    world.run(config, 40, seen=seen, check=check)


def _without_some(view: PoolView, chance: random.Random) -> PoolView:
    return replace(view, workers=tuple(w for w in view.workers if chance.random() < 0.7))


def _loads_unknown(view: PoolView, chance: random.Random) -> PoolView:
    blank = {"running": None, "waiting": None, "kv_usage": None, "load_age_s": None}
    return replace(view, workers=tuple(replace(w, **blank) if chance.random() < 0.5 else w for w in view.workers))


def _absurd(view: PoolView, chance: random.Random) -> PoolView:
    many = chance.choice((0, 1, 10**9))
    return replace(view, traffic=Traffic(10.0, many, 0, many * 10**6, 0, 10**9), queue=QueueView(10**6, 10**12, 1e9))


FAULTS: dict[str, Callable[[PoolView, random.Random], PoolView]] = {
    "no traffic": lambda view, _: replace(view, traffic=None, partial="the demand board did not answer"),
    "old traffic": lambda view, _: replace(view, traffic=view.traffic and replace(view.traffic, age_s=100.0)),
    "no span": lambda view, _: replace(view, traffic=view.traffic and replace(view.traffic, seconds=0.0)),
    "no queue": lambda view, _: replace(view, queue=None),
    "no rates": lambda view, _: replace(view, rates=None),
    "no capacity": lambda view, _: replace(view, kv_tokens=None),
    "zero capacity": lambda view, _: replace(view, kv_tokens=0),
    "old list": lambda view, _: replace(view, age_s=1000.0),
    "no workers": lambda view, _: replace(view, workers=()),
    "some workers": _without_some,
    "loads unknown": _loads_unknown,
    "restarted": lambda view, _: replace(view, workers=tuple(replace(w, epoch=Epoch(2)) for w in view.workers)),
    "clock back": lambda view, chance: replace(view, at_s=view.at_s - chance.choice((1.0, 50.0, 1e6))),
    "clock ahead": lambda view, chance: replace(view, at_s=view.at_s + chance.choice((1.0, 50.0, 1e9))),
    "absurd": _absurd,
}


@pytest.mark.parametrize("prefill", [1, 7])
@pytest.mark.parametrize("size", [0.3, 1.0, 4.0])
def test_steady_traffic_comes_to_rest(prefill: int, size: float) -> None:
    world = World(lambda t: PATTERNS["steady"](size, t), prefill, 8 - prefill, seed=prefill)
    world.run(FIXED, 80)
    late = [move for move in world.moves if move[0] > 400]
    assert len(late) <= 1
    directions = [to for _, _, to in world.moves]
    assert sum(a is not b for a, b in pairwise(directions)) <= 1


@pytest.mark.parametrize(("pattern", "start_s"), [("steady", 60.0), ("step up", 300.0), ("step down", 10.0)])
def test_scaling_comes_to_rest(pattern: str, start_s: float) -> None:
    world = World(lambda t: PATTERNS[pattern](1.0, t), 4, 4, start_s=start_s, seed=3)
    sizes: list[int] = []
    config = replace(SCALE, start_s=start_s)
    world.run(config, 150, check=lambda view, plan, world: sizes.append(len(world.workers) + len(world.starting)))
    late = sizes[100:]
    assert max(late) - min(late) <= 2
    turns = [b - a for a, b in pairwise(late) if a != b]
    assert all(turn < 0 for turn in turns) or all(turn > 0 for turn in turns), "no coming and going"


def test_a_sinusoid_is_followed_without_trembling() -> None:
    """Each half wave may turn the direction of moves once."""
    period = 900.0

    def load(t: float) -> Load:
        wave = math.sin(2 * math.pi * t / period)
        return Load(6.0, 2500 + 2200 * wave, 330 - 280 * wave)

    world = World(load, 4, 4, seed=1)
    world.run(FIXED, int(2 * period / 10))
    directions = [to for _, _, to in world.moves]
    turns = sum(a is not b for a, b in pairwise(directions))
    assert len(directions) >= 4, "it follows"
    assert turns <= 5


@pytest.mark.parametrize("start_s", [10.0, 60.0])
def test_what_is_taken_away_is_not_started_again_before_a_start_would_have_ended(start_s: float) -> None:
    changes: list[tuple[float, int]] = []

    def check(view: PoolView, plan: Plan, world: World) -> None:
        for action in plan.actions:
            if isinstance(action, AddAction | RemoveAction):
                changes.append((world.now, action.count if isinstance(action, AddAction) else -1))

    world = World(lambda t: Load(6 + 3 * math.sin(t * math.tau / 1500)), 5, 5, start_s=start_s, seed=1)
    world.run(replace(SCALE, start_s=start_s), 330, check=check)
    assert sum(count > 0 for _, count in changes) >= 3, "it follows"
    for (earlier, gone), (later, came) in pairwise(changes):
        assert not (gone < 0 < came) or later - earlier > start_s


def test_a_spike_that_is_over_before_a_worker_could_come_leaves_no_lasting_workers() -> None:
    world = World(lambda t: PATTERNS["spike"](1.0, t), 3, 3, start_s=60.0, seed=0)
    world.run(SCALE, 29)
    before = len(world.workers)
    world.run(SCALE, 80)
    assert len(world.workers) + len(world.starting) <= before + 1


def test_two_planners_with_the_same_view_and_memory_decide_the_same_and_with_another_memory_nothing_contrary() -> None:
    """Leader election lets one act; for a moment there may be two."""
    world = World(lambda t: PATTERNS["shifting mix"](1.0, t), 4, 4, seed=5)
    mine, other = Memory(), Memory()
    for number in range(80):
        world.pass_time(10.0)
        view = world.view(10.0)
        plan, after = step(view, mine, FIXED)
        assert step(view, mine, FIXED) == (plan, after)
        mine = after
        second, other = step(view, other, FIXED)
        world.obey(plan)
        if number > 20:
            both = [*plan.actions, *second.actions]
            wanted = {a.worker: a.to for a in both if isinstance(a, MoveAction)}
            assert len({a.to for a in both if isinstance(a, MoveAction)}) <= 1 or len(wanted) == len(both)
            world.obey(second)
            assert world.count(Role.PREFILL) >= 1 and world.count(Role.DECODE) >= 1


def test_an_empty_pool_is_left_alone() -> None:
    plan, memory = step(PoolView(POOL, 0.0), Memory(), SCALE)
    assert not plan.actions and "no worker is known" in plan.verdict
    for number in range(1, 20):
        plan, memory = step(PoolView(POOL, 10.0 * number), memory, SCALE)
        assert not any(isinstance(action, RemoveAction) for action in plan.actions)
