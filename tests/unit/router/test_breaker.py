"""The breaker's states, without clock or I/O."""

from __future__ import annotations

import itertools
import random

import pytest

from vllm_pd.router.breaker import (
    BUSY_S,
    FAILURE_MEMORY_S,
    FAILURES_TO_OPEN,
    FIRST_PAUSE_S,
    LONGEST_BUSY_S,
    LONGEST_PAUSE_S,
    LONGEST_STUCK_PAUSE_S,
    TRIAL_S,
    Breaker,
    Circuit,
    Sign,
    Trouble,
    sign_of,
)

CLOSED = Breaker()


def failed(times: int, now: float = 100.0) -> Breaker:
    breaker = CLOSED
    for _ in range(times):
        breaker = breaker.failed(now, "status 500")
    return breaker


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Sign.FINE),
        (302, Sign.FINE),
        (400, Sign.FINE),
        (404, Sign.FINE),
        (422, Sign.FINE),
        (429, Sign.BUSY),
        (500, Sign.FAILED),
        (502, Sign.FAILED),
        (503, Sign.BUSY),
        (504, Sign.FAILED),
    ],
)
def test_what_a_status_says_about_the_worker(status: int, outcome: Sign) -> None:
    assert sign_of(status) is outcome


def test_it_opens_after_several_failed_answers_in_a_row() -> None:
    assert failed(FAILURES_TO_OPEN - 1).circuit is Circuit.CLOSED
    breaker = failed(FAILURES_TO_OPEN)
    assert breaker.circuit is Circuit.OPEN
    assert breaker.trouble is Trouble.FAILING
    assert breaker.cause == "status 500"
    assert not breaker.allows(1e9)


def test_a_good_answer_between_failed_ones_counts_them_anew() -> None:
    breaker = failed(FAILURES_TO_OPEN - 1).fine(100.0).failed(100.0, "status 500")
    assert breaker.circuit is Circuit.CLOSED


def test_failures_of_long_ago_do_not_count() -> None:
    breaker = failed(FAILURES_TO_OPEN - 1).failed(100.0 + FAILURE_MEMORY_S, "status 500")
    assert breaker.circuit is Circuit.CLOSED
    assert breaker.failures == 1


def test_back_pressure_never_opens_it_and_is_honoured() -> None:
    breaker = CLOSED
    for now in range(1000):
        breaker = breaker.busy(float(now), None)
    assert breaker.circuit is Circuit.CLOSED
    assert not breaker.allows(999 + BUSY_S - 0.01)
    assert breaker.allows(999 + BUSY_S)
    assert CLOSED.busy(0, 7).busy(0, 3).busy_until == 7
    assert CLOSED.busy(0, 1e9).busy_until == LONGEST_BUSY_S


def test_answers_to_earlier_requests_do_not_end_the_time_a_busy_worker_asks_for() -> None:
    breaker = CLOSED.busy(100.0, 5).fine(101.0)
    assert not breaker.allows(104.9)
    assert breaker.fine(105.0) == CLOSED


def test_back_pressure_does_not_forgive_failed_answers() -> None:
    breaker = failed(FAILURES_TO_OPEN - 1).busy(100.0, 0).failed(100.0, "status 500")
    assert breaker.circuit is Circuit.OPEN
    assert breaker.busy(100.0, 0).circuit is Circuit.OPEN


def test_a_refused_connection_opens_it_at_once_and_a_sign_of_life_closes_it() -> None:
    breaker = CLOSED.refused(100.0, "Connection refused")
    assert breaker.circuit is Circuit.OPEN
    assert breaker.retry_at == 100.0 + FIRST_PAUSE_S
    assert breaker.alive() == CLOSED


def test_refusals_side_by_side_count_once() -> None:
    breaker = CLOSED.refused(100.0, "refused")
    again = breaker
    for _ in range(2000):
        again = again.refused(100.1, "refused")
    assert again == breaker


@pytest.mark.parametrize("event", ["refused", "down"])
def test_pauses_double_up_to_the_longest(event: str) -> None:
    breaker, now, pauses = CLOSED, 100.0, []
    for _ in range(8):
        breaker = getattr(breaker, event)(now, "gone")
        pauses.append(breaker.retry_at - now)
        now = breaker.retry_at
    assert pauses == [min(FIRST_PAUSE_S * 2**i, LONGEST_PAUSE_S) for i in range(8)]
    assert breaker.since == 100.0


def test_failing_worker_that_answers_health_is_tried_by_one_request_at_a_time() -> None:
    breaker = failed(FAILURES_TO_OPEN).alive()
    assert breaker.circuit is Circuit.HALF_OPEN
    assert breaker.allows(200.0)
    breaker = breaker.sent(200.0)
    assert not breaker.allows(200.0 + TRIAL_S - 0.01)
    assert breaker.allows(200.0 + TRIAL_S)
    assert breaker.fine(200.5) == CLOSED
    again = breaker.failed(200.5, "status 500")
    assert again.circuit is Circuit.OPEN
    assert again.retry_at - 200.5 == 2 * FIRST_PAUSE_S


def test_trial_that_is_answered_with_back_pressure_decides_nothing() -> None:
    breaker = failed(FAILURES_TO_OPEN).alive().sent(200.0).busy(200.1, 5)
    assert breaker.circuit is Circuit.HALF_OPEN
    assert not breaker.allows(205.0)
    assert breaker.allows(205.1)


def test_stuck_engine_is_tried_seldom_and_by_requests_only() -> None:
    breaker, now, pauses = CLOSED, 100.0, []
    for _ in range(6):
        breaker = breaker.stuck(now, "no step for 15 s")
        pauses.append(breaker.retry_at - now)
        now = breaker.retry_at
        breaker = breaker.alive()
        assert breaker.circuit is Circuit.HALF_OPEN
    assert pauses[0] == LONGEST_PAUSE_S
    assert pauses[-1] == LONGEST_STUCK_PAUSE_S
    assert pauses == sorted(pauses)
    # What it reported before does not show that it computes now.
    assert breaker.stuck(now, "again").since == now
    assert breaker.fine(now) == CLOSED


def test_a_worker_that_stops_while_it_fails_is_known_as_down() -> None:
    breaker = failed(FAILURES_TO_OPEN).down(101.0, "no sign of life for 5 s")
    assert breaker.trouble is Trouble.DOWN
    assert breaker.since == 101.0
    assert breaker.alive() == CLOSED


def test_every_way_through_the_states_keeps_what_holds_for_all() -> None:
    events = {
        "fine": lambda b, t: b.fine(t),
        "busy": lambda b, t: b.busy(t, 2.0),
        "failed": lambda b, t: b.failed(t, "x"),
        "refused": lambda b, t: b.refused(t, "x"),
        "down": lambda b, t: b.down(t, "x"),
        "stuck": lambda b, t: b.stuck(t, "x"),
        "alive": lambda b, t: b.alive(),
        "sent": lambda b, t: b.sent(t),
    }
    chance = random.Random(4)
    for way in itertools.chain(
        itertools.product(events, repeat=4), (chance.choices(list(events), k=60) for _ in range(500))
    ):
        breaker, now = CLOSED, 100.0
        for event in way:
            now += chance.choice((0.0, 0.3, 5.0, 40.0))
            breaker = events[event](breaker, now)
            assert (breaker.circuit is Circuit.CLOSED) == (breaker.trouble is Trouble.NONE)
            assert breaker.circuit is not Circuit.OPEN or not breaker.allows(1e12)
            # Nothing keeps a worker out for ever: it is looked at, then tried.
            assert breaker.retry_at <= now + LONGEST_STUCK_PAUSE_S
            assert breaker.alive().allows(now + max(LONGEST_BUSY_S, TRIAL_S))
            assert breaker.alive().fine(now + LONGEST_BUSY_S) == CLOSED
