"""What computing is believed to cost, from steps of all kinds."""

from __future__ import annotations

import random

import pytest

from vllm_pd.kv_offload.prefill_rate import PrefillRate, PrefillSpeed, StepWork, pairs
from vllm_pd.kv_offload.step_clock import StepClock

CPU = PrefillSpeed(base_s=0.004, token_s=8e-5, pair_s=2e-8, sequence_s=1e-3)
GPU = PrefillSpeed(base_s=0.008, token_s=1e-5, pair_s=5e-10, sequence_s=5e-5)


def seconds_of(speed: PrefillSpeed, work: StepWork) -> float:
    return speed.base_s + work.tokens * speed.token_s + work.pairs * speed.pair_s + work.decoding * speed.sequence_s


def teach(rate: PrefillRate, truth: PrefillSpeed, steps: int, *, stalls: float = 0.0) -> None:
    """Chunked prefill as vLLM schedules it: mostly decoding, now and then a prompt in chunks of 2048 tokens."""
    chance = random.Random(5)
    for _ in range(steps):
        work = StepWork(decoding=chance.randrange(8))
        if chance.random() < 0.3:
            context = chance.choice((0, 0, 2048, 4096, 6144))
            work = work.plus_prompt(2048 if context else chance.randrange(40, 2048), context)
        seconds = seconds_of(truth, work) * chance.uniform(0.9, 1.1)
        rate.observe(work, seconds * (30 if chance.random() < stalls else 1))


@pytest.mark.parametrize("truth", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("stalls", [0.0, 0.05])
def test_mixed_steps_tell_what_prompt_tokens_cost(truth: PrefillSpeed, stalls: float) -> None:
    rate = PrefillRate()
    teach(rate, truth, 400, stalls=stalls)
    for tokens, context in [(500, 0), (2000, 0), (2000, 6000), (6000, 0)]:
        wanted = truth.added_s(tokens, context, 2048)
        assert rate.speed.added_s(tokens, context, 2048) == pytest.approx(wanted, rel=0.35), (tokens, context)


def test_steps_that_only_decode_say_nothing_of_prompts() -> None:
    rate = PrefillRate()
    for _ in range(500):
        rate.observe(StepWork(decoding=4), 0.05)
    assert rate.prefills == 0


def test_work_adds_up_over_requests() -> None:
    work = StepWork(decoding=2).plus_prompt(100, 0).plus_prompt(10, 1000)
    assert work == StepWork(tokens=110, pairs=100 * 50 + 10 * 1005, decoding=2)
    assert pairs(0, 500) == 0


def test_more_tokens_than_a_step_takes_need_more_steps() -> None:
    assert CPU.added_s(4096, 0, 2048) - CPU.added_s(4096, 0, 1 << 20) == pytest.approx(2 * CPU.base_s)


def test_a_step_lasts_from_its_schedule_to_its_output() -> None:
    clock = StepClock()
    clock.scheduled(StepWork(tokens=5), 10.0)
    assert clock.ended(10.5) == (StepWork(tokens=5), 0.5)
    clock.scheduled(StepWork(decoding=1), 60.0)
    assert clock.ended(60.25) == (StepWork(decoding=1), 0.25)
    assert clock.busy_s == 0.75


def test_a_step_that_was_scheduled_while_another_ran_begins_when_that_ends() -> None:
    clock = StepClock()
    clock.scheduled(StepWork(tokens=1), 0.0)
    clock.scheduled(StepWork(tokens=2), 0.1)
    assert clock.ended(1.0) == (StepWork(tokens=1), 1.0)
    clock.scheduled(StepWork(tokens=3), 1.1)
    assert clock.ended(1.5) == (StepWork(tokens=2), 0.5)
    assert clock.ended(2.0) == (StepWork(tokens=3), 0.5)
    assert clock.busy_s == 2.0


def test_a_step_without_work_is_no_busy_time() -> None:
    clock = StepClock()
    clock.scheduled(StepWork(), 0.0)
    assert clock.ended(1.0) == (StepWork(), 1.0)
    assert clock.busy_s == 0.0
    assert clock.ended(2.0) is None
