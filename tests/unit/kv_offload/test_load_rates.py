"""What is believed of a tier's speed after loads of all sizes, outliers and changes of the drive."""

from __future__ import annotations

import random

import pytest

from vllm_pd.kv_offload.load_rates import CPU_PRIOR, SSD_PRIOR, LoadRate, LoadSpeed

KIB, MIB = 1024, 1024 * 1024
SIZES = [64 * KIB, 300 * KIB, MIB, 5 * MIB, 40 * MIB]

FAST = LoadSpeed(latency_s=2e-4, bytes_per_s=5e9)
SLOW = LoadSpeed(latency_s=8e-3, bytes_per_s=9e7)
"""A network drive."""


def teach(rate: LoadRate, truth: LoadSpeed, count: int, *, sizes: list[int] = SIZES, stalls: float = 0.0) -> None:
    chance = random.Random(3)
    for _ in range(count):
        size = chance.choice(sizes)
        queued = chance.choice((0, 0, chance.choice(sizes)))
        seconds = truth.predict_s(size, queued) * chance.uniform(0.9, 1.1)
        rate.observe(size, seconds * (50 if chance.random() < stalls else 1), queued)


def worst_error(rate: LoadRate, truth: LoadSpeed) -> float:
    return max(abs(rate.predict_s(size) / truth.predict_s(size) - 1) for size in SIZES)


def test_nothing_seen_yet_means_the_prior() -> None:
    rate = LoadRate(SSD_PRIOR)
    assert rate.predict_s(MIB) == pytest.approx(SSD_PRIOR.predict_s(MIB))
    assert rate.loads == 0


@pytest.mark.parametrize("truth", [FAST, SLOW], ids=["faster than the prior", "a network drive"])
def test_a_few_dozen_loads_tell_latency_and_speed(truth: LoadSpeed) -> None:
    rate = LoadRate(SSD_PRIOR)
    teach(rate, truth, 60)
    assert worst_error(rate, truth) < 0.3
    assert rate.speed.bytes_per_s == pytest.approx(truth.bytes_per_s, rel=0.3)


def test_one_stalled_load_is_no_rate() -> None:
    rate = LoadRate(CPU_PRIOR)
    rate.observe(MIB, 30.0)
    assert rate.predict_s(MIB) < 3 * CPU_PRIOR.predict_s(MIB)


def test_a_tenth_of_stalls_changes_little() -> None:
    rate = LoadRate(SSD_PRIOR)
    teach(rate, FAST, 200, stalls=0.1)
    assert worst_error(rate, FAST) < 0.4


def test_queued_bytes_count_as_bytes() -> None:
    rate = LoadRate(SSD_PRIOR)
    teach(rate, SLOW, 60)
    assert rate.predict_s(MIB, queued=4 * MIB) == pytest.approx(rate.predict_s(5 * MIB))


@pytest.mark.parametrize(("before", "after"), [(FAST, SLOW), (SLOW, FAST)], ids=["slower", "faster again"])
def test_a_drive_that_changes_is_learned_anew(before: LoadSpeed, after: LoadSpeed) -> None:
    rate = LoadRate(SSD_PRIOR)
    teach(rate, before, 300)
    teach(rate, after, 60)
    assert worst_error(rate, after) < 0.4


def test_what_was_seen_of_sizes_that_no_longer_come_is_forgotten() -> None:
    rate = LoadRate(SSD_PRIOR)
    teach(rate, SLOW, 100)
    teach(rate, FAST, 400, sizes=[300 * KIB, MIB])
    assert rate.predict_s(40 * MIB) < 2 * FAST.predict_s(40 * MIB)


def test_nonsense_changes_nothing() -> None:
    rate = LoadRate(SSD_PRIOR)
    for size, seconds, queued in [(0, 1.0, 0), (-5, 1.0, 0), (MIB, 0.0, 0), (MIB, -1.0, 0), (MIB, 1.0, -1)]:
        rate.observe(size, seconds, queued)
    assert rate.loads == 0
    assert rate.predict_s(MIB) == pytest.approx(SSD_PRIOR.predict_s(MIB))


@pytest.mark.parametrize("latency_s, bytes_per_s", [(1, 0), (1, -1), (-1, 1)])
def test_a_prior_must_be_a_speed(latency_s: float, bytes_per_s: float) -> None:
    with pytest.raises(ValueError, match="latency must not be negative"):
        LoadSpeed(latency_s, bytes_per_s)
