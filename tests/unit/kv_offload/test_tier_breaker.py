"""A tier that keeps failing is switched off, tried again after growing pauses, and comes back."""

from __future__ import annotations

from vllm_pd.kv_offload.tier_breaker import (
    FAILURES_TO_OPEN,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    ON,
    OUTCOMES,
    TRIAL_S,
    WINDOW_S,
    TierBreaker,
)


def off(now: float = 0.0) -> TierBreaker:
    breaker = ON
    for _ in range(FAILURES_TO_OPEN):
        breaker = breaker.failed(now, "EIO")
    return breaker


def test_single_failures_switch_nothing_off() -> None:
    breaker = ON
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker = breaker.failed(1.0, "EIO")
    assert not breaker.is_off and not breaker.is_due(1e9)


def test_failures_close_together_switch_it_off_and_name_the_last_cause() -> None:
    breaker = off(5.0)
    assert breaker.is_off and breaker.off_since == 5.0 and breaker.cause == "EIO"
    assert not breaker.is_due(5.0) and breaker.is_due(5.0 + FIRST_PAUSE_S)


def test_every_second_failure_is_enough_and_rare_ones_are_not() -> None:
    breaker = ON
    for step in range(OUTCOMES):
        breaker = breaker.failed(step, "EIO") if step % 2 else breaker.fine(step)
    assert breaker.is_off
    rare = ON
    for step in range(100):
        rare = rare.failed(step, "EIO") if step % 3 == 0 else rare.fine(step)
    assert not rare.is_off and len(rare.recent) == OUTCOMES


def test_old_failures_do_not_count() -> None:
    breaker = ON
    for step in range(20):
        breaker = breaker.failed(step * WINDOW_S, "EIO")
    assert not breaker.is_off


def test_pauses_grow_to_a_longest_one() -> None:
    breaker, now, pauses = off(), 0.0, []
    for _ in range(12):
        pauses.append(breaker.retry_at - now)
        now = breaker.retry_at
        breaker = breaker.trying(now).failed(now, "still EIO")
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(pauses) == pauses[-1] == LONGEST_PAUSE_S
    assert breaker.cause == "still EIO" and breaker.off_since == 0.0


def test_one_trial_at_a_time_and_a_lost_one_is_followed_by_another() -> None:
    breaker = off().trying(10.0)
    assert not breaker.is_due(10.0 + TRIAL_S - 1) and breaker.is_due(10.0 + TRIAL_S)


def test_a_trial_that_goes_well_forgets_everything() -> None:
    assert off().trying(3.0).fine(3.0) == ON
