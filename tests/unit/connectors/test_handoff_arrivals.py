"""A hand-off is given up only where it is certain that nothing reads it."""

from __future__ import annotations

import pytest

from vllm_pd.connectors import handoff_arrivals
from vllm_pd.connectors.handoff_arrivals import REMEMBER_S, HandoffArrivals

BLOCKS = ("engine", "request")
OTHER = ("engine", "other")
FAR = 1e9


def test_what_has_not_come_is_given_up_and_refused_when_it_comes() -> None:
    arrivals = HandoffArrivals()
    assert arrivals.give_up(BLOCKS, until=30.0, now=0.0)
    assert arrivals.arrived("r", BLOCKS, 29.0)
    assert not arrivals.arrived("o", OTHER, 29.0)


def test_giving_up_twice_is_the_same_as_once() -> None:
    arrivals = HandoffArrivals()
    assert arrivals.give_up(BLOCKS, until=30.0, now=0.0)
    assert arrivals.give_up(BLOCKS, until=20.0, now=1.0)
    assert arrivals.arrived("r", BLOCKS, 29.0)


def test_one_that_was_refused_is_not_there() -> None:
    arrivals = HandoffArrivals()
    arrivals.give_up(BLOCKS, until=FAR, now=0.0)
    arrivals.arrived("r", BLOCKS, 1.0)
    arrivals.ended("r", 2.0)
    assert arrivals.give_up(BLOCKS, until=FAR, now=3.0)


def test_what_has_come_may_read_until_long_after_its_end() -> None:
    arrivals = HandoffArrivals()
    assert not arrivals.arrived("r", BLOCKS, 0.0)
    assert not arrivals.give_up(BLOCKS, FAR, 10_000.0), "however long it takes"
    arrivals.ended("r", 10_000.0)
    assert not arrivals.give_up(BLOCKS, FAR, 10_000.0 + REMEMBER_S - 1)


def test_two_requests_for_the_same_blocks_both_count() -> None:
    arrivals = HandoffArrivals()
    arrivals.arrived("a", BLOCKS, 0.0)
    arrivals.arrived("b", BLOCKS, 0.0)
    arrivals.ended("a", 0.0)
    arrivals.arrived("c", OTHER, 2 * REMEMBER_S)
    arrivals.ended("c", 2 * REMEMBER_S)
    assert not arrivals.give_up(BLOCKS, FAR, 2 * REMEMBER_S)


def test_the_end_of_a_request_without_a_hand_off_is_nothing() -> None:
    arrivals = HandoffArrivals()
    arrivals.ended("r", 0.0)
    assert arrivals.give_up(BLOCKS, FAR, 0.0)


def test_what_ended_is_forgotten_in_time() -> None:
    arrivals = HandoffArrivals()
    for n in range(3):
        arrivals.arrived("r", ("engine", str(n)), 0.0)
        arrivals.ended("r", n * REMEMBER_S)
    assert len(arrivals._ended) == 1
    assert not arrivals._requests and not arrivals._here


def test_with_too_much_to_remember_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_arrivals, "MAX_ENDED", 2)
    arrivals = HandoffArrivals()
    for n in range(3):
        arrivals.arrived("r", ("engine", str(n)), 0.0)
        arrivals.ended("r", 0.0)
    assert len(arrivals._ended) == 2
    assert not arrivals.give_up(("engine", "0"), FAR, 1.0), "it is forgotten, and may be read still"
    assert not arrivals.give_up(OTHER, FAR, 1.0), "it cannot be told from such a one"
    assert arrivals.give_up(OTHER, FAR, REMEMBER_S)


def test_with_too_many_given_up_another_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_arrivals, "MAX_GIVEN_UP", 1)
    arrivals = HandoffArrivals()
    assert arrivals.give_up(BLOCKS, until=10.0, now=0.0)
    assert not arrivals.give_up(OTHER, until=10.0, now=1.0)
    assert arrivals.arrived("r", BLOCKS, 9.0), "it would have been forgotten, and read"
    assert arrivals.give_up(OTHER, until=20.0, now=11.0)
