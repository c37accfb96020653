"""What returns is found, gone by where that is better than smoothing, and forgotten when it ends."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.planner.toy_world import Load, World
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.forecast import Forecast, forecasts
from vllm_pd.planner.long_history import KEPT, WIDTHS_S, columns, remembered
from vllm_pd.planner.memory import Buckets, Memory, Sample, decode_memory, encode_memory
from vllm_pd.planner.model import Mode, Plan, RemoveAction
from vllm_pd.planner.periods import LEAST, period, usual
from vllm_pd.state.base import Role

NOON = 1_700_000_000.0
"""Some time on the clock that planners share."""


def wave(every: int, count: int, noise: float = 0.0, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [10.0 + 4.0 * math.sin(math.tau * n / every) + chance.gauss(0.0, noise) for n in range(count)]


@pytest.mark.parametrize("every", [LEAST, 25, 40, 144])
def test_a_period_is_found_once_it_was_seen_twice(every: int) -> None:
    assert period(wave(every, round(1.5 * every))) == 0
    assert period(wave(every, 3 * every)) == pytest.approx(every, abs=1)
    assert period(wave(every, 5 * every, noise=2.0)) == pytest.approx(every, abs=max(1, every // 20))


def test_a_period_of_any_shape_is_found() -> None:
    assert period([30.0 if n % 24 in (9, 10, 11) else 5.0 for n in range(80)]) == 24


def test_neither_noise_nor_a_change_for_good_nor_rest_is_a_period() -> None:
    chance = random.Random(1)
    found = [period([chance.gauss(10.0, 3.0) for _ in range(count)]) for count in range(20, 360, 5)]
    assert sum(map(bool, found)) <= 1
    assert period([10.0] * 100) == period([0.0] * 100) == period([]) == 0
    assert period([5.0] * 60 + [15.0] * 60) == period([float(n) for n in range(120)]) == 0
    assert period([3.0] * 50 + [20.0] * 5 + [3.0] * 50) == 0


def test_what_is_usual_is_told_by_nothing_that_came_later() -> None:
    values = wave(25, 100)
    before = usual(values, 25, 0)
    assert before[:25] == [None] * 25 and None not in before[25:]
    assert usual([*values[:60], *[99.0] * 40], 25, 0)[:60] == before[:60]
    assert usual(values, 25, 30)[100:125] == pytest.approx(before[75:100], rel=0.1)


def sample(arrivals: float, seconds: float = 10.0) -> Sample:
    return Sample(seconds, arrivals, arrivals * 1000, arrivals * 800, arrivals * 200, 2000.0)


def test_a_day_is_found_in_ten_minutes_and_a_week_in_hours() -> None:
    day = [4.0 + 3.0 * math.sin(math.tau * n / 144) for n in range(KEPT)]
    assert period(day) == pytest.approx(144, abs=2)
    week = [(4.0 + 3.0 * math.sin(math.tau * n / 24)) * (0.3 if n % 168 >= 120 else 1.0) for n in range(KEPT)]
    assert period(week) == 168


def test_the_memory_is_bounded_however_long_it_grows() -> None:
    ages: tuple[Buckets, ...] = ()
    for number in range(150):
        ages = remembered(ages, sample(5.0, 10_000.0), NOON + number * 10_000.0)
    assert [each.width_s for each in ages] == list(WIDTHS_S)
    assert [len(columns(each)[0]) for each in ages] == [KEPT] * 3
    data = encode_memory(Memory(ages=ages))
    assert len(data) < 25_000 and decode_memory(data) == Memory(ages=ages)


def test_a_bucket_holds_the_mean_and_a_gap_is_filled_and_a_clock_that_jumps_far_begins_anew() -> None:
    ages: tuple[Buckets, ...] = ()
    for number, arrivals in enumerate((1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 7.0)):
        ages = remembered(ages, sample(arrivals), 600.0 + 10.0 * (number + 1))
    assert columns(ages[0])[0] == [pytest.approx(2.0)] and columns(ages[0])[4] == [pytest.approx(2000.0)]
    ages = remembered(ages, sample(5.0), 600.0 + 300.0)
    assert columns(ages[0])[0] == pytest.approx([2.0, 7.0, 7.0, 7.0])
    for jump in (-1e6, 1e9):
        after = remembered(ages, sample(5.0), 900.0 + jump)
        assert [columns(each)[0] for each in after] == [[], [], []]
        assert [each.index for each in after] == [int((895.0 + jump) // width) for width in WIDTHS_S]


def test_buckets_of_another_version_are_begun_anew() -> None:
    ages: tuple[Buckets, ...] = ()
    for number in range(20):
        ages = remembered(ages, sample(5.0), 600.0 + 10.0 * number)
    for other in (
        {"packed": ages[0].packed + b"123"},
        {"sums": (1.0, 2.0)},
        {"periods": (0, 0)},
        {"periods": (9,) * 5},
    ):
        after = remembered((replace(ages[0], **other), *ages[1:]), sample(5.0), 800.0)
        assert columns(after[0])[0] == [] and after[1] == remembered(ages, sample(5.0), 800.0)[1]


def foreseen(load: Callable[[float], float], seconds: float, ahead_s: float = 300.0, seed: int = 0) -> Forecast:
    """What is expected after so long, with chance in what arrives each ten seconds."""
    chance = random.Random(seed)
    ages: tuple[Buckets, ...] = ()
    history: list[Sample] = []
    for number in range(1, round(seconds / 10.0) + 1):
        at_s = NOON + 10.0 * number
        arrivals = max(0.0, chance.gauss(load(at_s), math.sqrt(load(at_s) / 10.0)))
        history = [*history, sample(arrivals)][-120:]
        ages = remembered(ages, history[-1], at_s)
    (found,) = forecasts(history, (ahead_s,), ages=ages, at_s=NOON + seconds)
    return found


def swing(at_s: float) -> float:
    """Every 25 minutes."""
    return 5.0 + 4.0 * math.sin(math.tau * (at_s - NOON) / 1500.0)


def test_what_returns_is_expected_to_turn_before_it_does() -> None:
    top = 3 * 1500.0 + 300.0
    assert swing(NOON + top) > 8.7 and swing(NOON + top + 300.0) == pytest.approx(7.35, abs=0.1)
    found = foreseen(swing, top)
    assert found.returns and "returns every 25 minutes" in found.by
    assert found.demand.arrivals == pytest.approx(7.35, rel=0.15) and found.decode_spread < 0.2
    assert found.held == pytest.approx(2000.0) or found.held is None


def test_before_a_period_was_seen_twice_nothing_is_said_to_return_and_where_nothing_does_neither() -> None:
    assert not foreseen(swing, 2700.0).returns
    for seed in range(3):
        assert not foreseen(lambda _: 5.0, 5400.0, seed=seed).returns


def test_what_does_not_return_any_more_is_forgotten() -> None:
    end = 4 * 1500.0
    found = foreseen(lambda at_s: swing(at_s) if at_s < NOON + end else 5.0, end + 2000.0)
    assert not found.returns
    assert found.demand.arrivals == pytest.approx(5.0, rel=0.2)


def test_more_than_usual_is_expected_to_stay_more() -> None:
    end = 4 * 1500.0
    found = foreseen(lambda at_s: swing(at_s) * (1.0 if at_s < NOON + end else 1.4), end + 600.0)
    assert found.demand.arrivals == pytest.approx(1.4 * swing(NOON + end + 900.0), rel=0.25)


def test_what_requests_are_like_may_return_where_their_number_does_not() -> None:
    ages: tuple[Buckets, ...] = ()
    history: list[Sample] = []
    for number in range(1, 481):
        at_s = NOON + 10.0 * number
        tokens = 1000.0 * swing(at_s)
        history = [*history, Sample(10.0, 5.0, tokens, tokens, 900.0, 2000.0)][-120:]
        ages = remembered(ages, history[-1], at_s)
    (found,) = forecasts(history, (300.0,), ages=ages, at_s=NOON + 4800.0)
    assert found.returns and found.demand.arrivals == pytest.approx(5.0)
    assert found.demand.uncached_tokens == pytest.approx(1000.0 * swing(NOON + 5100.0), rel=0.1)
    assert found.demand.output_tokens == pytest.approx(900.0)


def test_where_only_a_part_of_what_returns_can_be_told_nothing_is_taken_from_it() -> None:
    """How many requests arrive was seen twice, what they are like, which is slower, was not."""
    ages: tuple[Buckets, ...] = ()
    history: list[Sample] = []
    for number in range(1, 331):
        at_s = NOON + 10.0 * number
        tokens = 1000.0 * swing(at_s) * (1.0 + 0.9 * math.sin(math.tau * number / 330))
        history = [*history, Sample(10.0, swing(at_s), tokens, tokens, 900.0)][-120:]
        ages = remembered(ages, history[-1], at_s)
    (found,) = forecasts(history, (300.0,), ages=ages, at_s=NOON + 3300.0)
    assert ages[0].periods[0] == pytest.approx(25, abs=1) and not found.returns
    assert found == forecasts(history, (300.0,))[0]


SLOW = PlannerConfig(Mode.SCALE, ttft_s=1.0, itl_s=0.05, min_workers=2, max_workers=16, start_s=150.0)


@pytest.fixture(scope="module")
def known() -> tuple[World, list[Plan], Memory]:
    """A planner of load that returns every twenty minutes, while it falls for the third time."""
    world = World(lambda t: Load(6.0 + 4.0 * math.sin(math.tau * t / 1200.0)), 6, 6, start_s=150.0, noise=False)
    return world, *world.run(SLOW, 295)


def removed(plans: list[Plan]) -> dict[float, str]:
    return {plan.at_s: plan.verdict for plan in plans if any(isinstance(each, RemoveAction) for each in plan.actions)}


def test_workers_go_at_once_when_what_returns_says_that_they_are_not_needed_for_longer_than_a_start_takes(
    known: tuple[World, list[Plan], Memory],
) -> None:
    _, plans, memory = known
    assert memory.ages[0].periods[0] == 20
    at_once = [at_s for at_s, why in removed(plans).items() if f"for {3 * SLOW.interval_s:.0f} s" in why]
    assert min(removed(plans)) < 2400.0 < min(at_once)
    assert len(at_once) == sum(at_s >= min(at_once) for at_s in removed(plans))


def test_workers_that_somebody_added_do_not_go_at_once(known: tuple[World, list[Plan], Memory]) -> None:
    world, _, memory = known
    world = copy.deepcopy(world)
    for _ in range(3):
        world.add(Role.DECODE)
    plans, memory = world.run(SLOW, 12, memory)
    assert not removed(plans)
    plans, _ = world.run(SLOW, 10, memory)
    assert removed(plans)
