"""When a worker counts as silent, its engine as stuck, a request as lost: without clock or I/O."""

from __future__ import annotations

from vllm_pd.router.signs_of_life import (
    LONGEST_STUCK,
    SETTLE_S,
    EngineReport,
    LegView,
    lost_legs,
    missing,
    silence,
    stuck_after,
)


def leg(waiting: float, *, begun: bool = False, sent: float = 0.0) -> LegView:
    return LegView(sent, waiting, begun)


def report(requests: int, seen: float = 0.0) -> EngineReport:
    return EngineReport(1, requests, seen)


def test_where_nothing_is_waited_for_nothing_is_silent() -> None:
    assert silence(100.0, [], 0.0) == 0
    # A client that reads slowly: the worker could send and is not asked to.
    assert silence(100.0, [leg(0.0, begun=True)], 0.0) == 0


def test_silence_begins_when_something_is_waited_for() -> None:
    assert silence(100.0, [leg(97.0)], 3.0) == 3.0


def test_any_sign_ends_it() -> None:
    assert silence(100.0, [leg(50.0)], 99.0) == 1.0
    assert silence(100.0, [leg(50.0), leg(98.0, begun=True)], 0.0) == 2.0


def test_a_request_that_was_just_sent_is_no_sign_of_life() -> None:
    assert silence(100.0, [leg(50.0), leg(99.9)], 0.0) == 50.0


def test_the_future_is_no_silence() -> None:
    # The loop's clock may be some milliseconds behind.
    assert silence(100.0, [leg(100.01)], 0.0) == 0


def test_an_engine_with_much_to_prefill_gets_more_time_up_to_a_bound() -> None:
    assert stuck_after(10.0, 0.1) == 10.0
    assert stuck_after(10.0, 5.0) == 20.0
    assert stuck_after(10.0, 1e6) == 10.0 * LONGEST_STUCK


def test_requests_that_the_engine_does_not_have_are_counted() -> None:
    legs = [leg(1.0), leg(2.0), leg(3.0)]
    assert missing(100.0, legs, report(3)) == 0
    assert missing(100.0, legs, report(1)) == 2
    assert missing(100.0, legs, report(50)) == 0, "others' requests"


def test_a_request_is_not_missed_before_a_report_can_show_it() -> None:
    legs = [leg(99.0, sent=100.0 - SETTLE_S / 2)]
    assert missing(100.0, legs, report(0)) == 0


def test_the_most_silent_ones_are_the_lost_ones() -> None:
    legs = [leg(80.0), leg(70.0), leg(99.0), leg(0.0)]
    assert lost_legs(100.0, legs, report(0), 10.0) == [1, 0]


def test_what_the_api_server_may_still_be_reading_is_not_lost() -> None:
    legs = [leg(70.0), leg(80.0, begun=True)]
    assert lost_legs(100.0, legs, report(1), 10.0) == [1]
