from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.routing.model import Rates
from vllm_pd.routing.rates import RateLearner, Speed, prefill_work, together

GPU = Rates(prefill_base=0.0165, prefill_token=1.5e-5, prefill_square=8.4e-10, prefill_context=8.4e-10)
CPU = Rates(prefill_base=0.02, prefill_token=1.8e-3, prefill_square=1e-7, prefill_context=1e-7)
"""A hundred times slower than the prior."""


def teach(
    learner: RateLearner | Speed,
    truth: Rates,
    count: int,
    noise: Callable[[random.Random], float] = lambda chance: chance.uniform(0.9, 1.1),
) -> None:
    chance = random.Random(7)
    for _ in range(count):
        new, cached = chance.randrange(1, 12_000), chance.choice((0, 0, chance.randrange(20_000)))
        learner.observe_prefill(prefill_work(new, cached), truth.prefill(new, cached) * noise(chance))


def worst_error(rates: Rates, truth: Rates) -> float:
    prompts = [(100, 0), (1000, 0), (10_000, 0), (500, 15_000), (5000, 5000)]
    return max(abs(rates.prefill(*prompt) / truth.prefill(*prompt) - 1) for prompt in prompts)


@pytest.mark.parametrize("truth", [GPU, CPU], ids=["like the prior", "a hundred times slower"])
def test_learns_a_worker_from_a_few_dozen_requests(truth: Rates) -> None:
    learner = RateLearner()
    teach(learner, truth, 80)
    assert worst_error(learner.rates, truth) < 0.3


def test_ten_requests_are_enough_for_the_order_of_magnitude() -> None:
    learner = RateLearner()
    teach(learner, CPU, 10)
    assert worst_error(learner.rates, CPU) < 1


def test_one_outlier_is_no_rate() -> None:
    learner = RateLearner()
    learner.observe_prefill(prefill_work(1000, 0), 60.0)
    assert learner.rates.prefill(1000, 0) < 3 * Rates().prefill(1000, 0)


def test_a_tenth_of_stalls_changes_little() -> None:
    learner = RateLearner()
    teach(learner, GPU, 300, lambda chance: 20.0 if chance.random() < 0.1 else 1.0)
    assert worst_error(learner.rates, GPU) < 0.35


def test_follows_a_worker_that_becomes_slower() -> None:
    learner = RateLearner(GPU)
    teach(learner, GPU, 100)
    teach(learner, CPU, 100)
    assert worst_error(learner.rates, CPU) < 0.35


def test_loads_from_slower_tiers_are_learned_with_the_prefill() -> None:
    learner = RateLearner()
    truth = Rates(cpu_block=2e-4, ssd_block=3e-3)
    chance = random.Random(3)
    for _ in range(120):
        new, cpu, ssd = chance.randrange(1, 4000), chance.choice((0, 300)), chance.choice((0, 200))
        seconds = truth.prefill(new, 0) + cpu * truth.cpu_block + ssd * truth.ssd_block
        learner.observe_prefill(prefill_work(new, 0, cpu, ssd), seconds)
    assert learner.rates.cpu_block == pytest.approx(truth.cpu_block, rel=0.2)
    assert learner.rates.ssd_block == pytest.approx(truth.ssd_block, rel=0.2)


def test_steps_and_hand_overs_are_learned() -> None:
    learner = RateLearner()
    chance = random.Random(2)
    for _ in range(100):
        running, blocks = chance.randrange(20), chance.randrange(50)
        learner.observe_step(running, 0.03 + 0.001 * running)
        learner.observe_transfer(blocks, 0.02 + 0.0005 * blocks)
    rates = learner.rates
    assert rates.step_base + 10 * rates.step_sequence == pytest.approx(0.04, rel=0.1)
    assert rates.transfer(5) == pytest.approx(0.0225, rel=0.15)
    assert rates.transfer(40) == pytest.approx(0.04, rel=0.15)


@given(st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 100_000), st.floats(-1, 1e9)), max_size=40))
@settings(max_examples=50, deadline=None)
def test_rates_stay_finite_and_never_negative(seen: list[tuple[int, int, float]]) -> None:
    learner = RateLearner()
    for new, cached, seconds in seen:
        learner.observe_prefill(prefill_work(new, cached), seconds)
    rates = learner.rates
    for rate in (rates.prefill_base, rates.prefill_token, rates.prefill_square, rates.prefill_context):
        assert 0 <= rate < 1e9
    assert rates.prefill(1000, 1000) > 0


def test_engines_of_a_pool_that_are_alike_share_their_rates() -> None:
    pool = RateLearner()
    engines = [Speed(pool) for _ in range(3)]
    for engine in engines:
        teach(engine, GPU, 100)
    assert all(engine.rates is pool.rates for engine in engines)


def test_an_engine_half_as_fast_as_its_pool_is_told_apart() -> None:
    pool = RateLearner()
    usual, slow = [Speed(pool) for _ in range(3)], Speed(pool)
    chance = random.Random(1)
    for _ in range(200):
        for engine in (*usual, slow):
            new = chance.randrange(1, 5000)
            engine.observe_prefill(prefill_work(new, 0), GPU.prefill(new, 0) * (2 if engine is slow else 1))
    assert usual[0].rates.prefill(2000, 0) == pytest.approx(GPU.prefill(2000, 0), rel=0.2)
    assert slow.rates.prefill(2000, 0) == pytest.approx(2 * GPU.prefill(2000, 0), rel=0.2)


def test_followers_hear_of_new_rates_and_may_be_forgotten() -> None:
    class Follower:
        heard = 0

        def rates_changed(self) -> None:
            self.heard += 1

    learner, follower = RateLearner(), Follower()
    learner.follow(follower)
    teach(learner, CPU, 10)
    assert follower.heard
    del follower
    gc.collect()
    teach(learner, CPU, 10)


def test_work_of_two_requests_adds_up() -> None:
    assert together(prefill_work(10, 20, 1, 2), prefill_work(4, 0)) == (2.0, 14.0, 58.0, 200.0, 1.0, 2.0)
