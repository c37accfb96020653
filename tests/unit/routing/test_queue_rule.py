"""The rules of the prefill queue as a router uses it."""

from __future__ import annotations

import pytest

from vllm_pd.routing.queue_rule import (
    LONGEST_DRAIN_S,
    UNKNOWN_S,
    Departure,
    Failure,
    departure,
    refusal,
    retry_after,
    waits_for_its_worker,
)


@pytest.mark.parametrize("failure", [*Failure, "status_4xx", "status_429", "status_503", "status_5xx"])
def test_decode_workers_stand_in_for_every_failure(failure: str) -> None:
    assert refusal(failure, strict=False) is None


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (Failure.QUEUE_FULL, 503),
        (Failure.UNCLAIMED, 503),
        (Failure.NO_WORKER, 503),
        (Failure.CONNECT, 503),
        ("status_429", 503),
        ("status_503", 503),
        (Failure.TIMEOUT, 504),
        (Failure.DISCONNECT, 502),
        (Failure.DEAD_LETTER, 502),
        (Failure.NO_PARAMS, 502),
        ("status_5xx", 502),
        # The request's own fault: the decode worker says what it is.
        (Failure.UNREADABLE, None),
        ("status_4xx", None),
    ],
)
def test_strict_mode_refuses_what_only_a_decode_worker_could_still_compute(failure: str, status: int | None) -> None:
    assert refusal(failure, strict=True) == status


@pytest.mark.parametrize(
    ("tokens", "per_token", "workers", "seconds"),
    [(0, 1e-3, 2, 1), (10_000, 1e-3, 2, 5), (10_001, 1e-3, 2, 6), (10_000_000, 1e-3, 2, 60), (5_000, 1e-3, 0, 5)],
)
def test_retry_after_is_the_time_of_what_waits(tokens: int, per_token: float, workers: int, seconds: int) -> None:
    assert retry_after(tokens, per_token, workers) == seconds


@pytest.mark.parametrize(
    ("lead", "session", "own"), [(1, False, True), (0, False, False), (-3, False, False), (0, True, True)]
)
def test_job_waits_for_the_worker_that_has_most_of_its_prompt(lead: int, session: bool, own: bool) -> None:
    assert waits_for_its_worker(lead, session=session) is own


@pytest.mark.parametrize(
    ("missing_s", "lease_ended", "what"),
    [
        (0.0, True, Departure.GIVE_UP),
        (0.0, False, Departure.MOVE_WAITING),
        (LONGEST_DRAIN_S - 1, False, Departure.MOVE_WAITING),
        (LONGEST_DRAIN_S, False, Departure.GIVE_UP),
        (0.0, None, Departure.KEEP),
        (UNKNOWN_S - 1, None, Departure.KEEP),
        (UNKNOWN_S, None, Departure.GIVE_UP),
    ],
)
def test_jobs_of_a_worker_that_is_not_registered(missing_s: float, lease_ended: bool | None, what: Departure) -> None:
    assert departure(missing_s, lease_ended=lease_ended) is what
