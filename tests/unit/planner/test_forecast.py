"""What is expected to arrive, and to be decoded, from what did."""

from __future__ import annotations

import random

import pytest

from tests.unit.planner.toy_world import Load, World
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.forecast import best_guesses, forecasts
from vllm_pd.planner.learn import answer_s
from vllm_pd.planner.memory import Sample


def history(arrivals: list[float], output: float = 500.0) -> list[Sample]:
    return [Sample(10.0, each, each * 1000, each * 800, output) for each in arrivals]


def test_steady_arrivals_are_expected_to_stay_and_nothing_seen_is_no_traffic() -> None:
    (found,) = forecasts(history([3.0] * 40), (60.0,))
    assert found.demand.arrivals == pytest.approx(3.0)
    assert found.demand.uncached_tokens == pytest.approx(2400.0)
    assert found.demand.output_tokens == pytest.approx(500.0)
    assert max(found.spreads) < 0.1
    (nothing,) = forecasts([], (60.0,))
    assert nothing.demand.arrivals == 0.0 and nothing.prefill_spread > 0.1


def test_what_grows_is_expected_to_grow_and_chance_is_not_taken_for_growth() -> None:
    growing = [1.0 + 0.1 * n for n in range(60)]
    (guess,) = best_guesses(growing, (6.0,))
    assert growing[-1] + 0.3 < guess.value < growing[-1] + 0.7
    chance = random.Random(1)
    (guess,) = best_guesses([chance.gauss(3.0, 0.5) for _ in range(100)], (6.0,))
    assert guess.value == pytest.approx(3.0, abs=0.35)


def test_more_that_arrive_than_are_being_answered_are_more_to_decode_the_more_the_later() -> None:
    seen = history([3.0] * 40, output=500.0)
    plain, soon, late = (
        forecasts(seen, (ahead,), answer_tokens=tokens, answer_s=60.0)[0].demand.output_tokens
        for ahead, tokens in ((60.0, 0.0), (10.0, 300.0), (300.0, 300.0))
    )
    assert plain == pytest.approx(500.0)
    assert 500.0 < soon < 600.0 < late < 900.0


def test_fewer_that_arrive_do_not_end_the_answers_that_are_given() -> None:
    (found,) = forecasts(history([1.0] * 40, output=500.0), (60.0,), answer_tokens=100.0, answer_s=60.0)
    assert found.demand.output_tokens == pytest.approx(500.0)


def test_how_long_answers_are_is_an_average_that_follows() -> None:
    world = World(lambda t: Load(4.0, output=300.0 if t < 300 else 900.0), noise=False)
    config = PlannerConfig(ttft_s=1.0, itl_s=0.05)
    _, memory = world.run(config, 29)
    assert memory.answer == pytest.approx(300.0)
    _, memory = world.run(config, 2, memory)
    assert 300.0 < memory.answer < 700.0
    _, memory = world.run(config, 30, memory)
    assert memory.answer == pytest.approx(900.0, rel=0.05)
    assert answer_s(memory) == pytest.approx(memory.answer * memory.steps[-1].itl_s)
