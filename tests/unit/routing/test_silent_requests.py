"""Requests whose first token the router does not see, because their answer comes in one piece."""

from __future__ import annotations

import pytest

from vllm_pd.routing.ledger import EngineLedger
from vllm_pd.routing.model import NO_OVERLAP, Ask, Rates
from vllm_pd.routing.rates import RateLearner
from vllm_pd.state.base import PoolId, Role, WorkerId
from vllm_pd.state.block_index import Holder

RATES = Rates(prefill_base=1.0, prefill_token=0.0, prefill_square=0.0, prefill_context=0.0)
ASK = Ask(100, 16)


@pytest.fixture
def ledger() -> EngineLedger:
    return EngineLedger(Holder(WorkerId("a")), PoolId("p"), Role.BOTH, learner=RateLearner(RATES))


def begin(ledger: EngineLedger, name: str, now: float, *, silent: bool = True) -> None:
    ledger.begin(name, ASK, NO_OVERLAP, now, silent=silent)


def test_long_answer_in_one_piece_does_not_look_like_a_queue(ledger: EngineLedger) -> None:
    for name in "abc":
        begin(ledger, name, 0.0)
    assert ledger.prefill_queue(0.0) == pytest.approx(3.0)
    assert ledger.silent_until == 1.0
    ledger.advance(2.5)
    assert (ledger.decoding, ledger.queued, ledger.inflight) == (2, 1, 3)
    assert ledger.prefill_queue(2.5) == pytest.approx(0.5)
    ledger.advance(60.0)
    assert (ledger.decoding, ledger.queued) == (3, 0)
    assert ledger.prefill_queue(60.0) == 0.0
    assert ledger.prefill_tokens == 0
    for name in "abc":
        ledger.finish(name, 61.0, output_tokens=100)
    assert (ledger.decoding, ledger.inflight, ledger.active_blocks) == (0, 0, 0)


def test_time_begins_anew_for_a_request_that_comes_when_all_before_it_are_done(ledger: EngineLedger) -> None:
    begin(ledger, "a", 0.0)
    begin(ledger, "b", 10.0)
    assert ledger.queued == 1
    assert ledger.prefill_queue(10.0) == pytest.approx(1.0)


def test_first_token_of_a_later_request_shows_that_silent_ones_before_it_are_done(ledger: EngineLedger) -> None:
    begin(ledger, "a", 0.0)
    begin(ledger, "b", 0.0)
    begin(ledger, "c", 0.0, silent=False)
    begin(ledger, "d", 0.0)
    ledger.first_token("c", 0.5)
    assert (ledger.decoding, ledger.queued) == (3, 1)
    assert ledger.prefill_queue(0.5) == pytest.approx(1.0)


def test_what_is_learned_covers_the_silent_requests_too(ledger: EngineLedger) -> None:
    now = 0.0
    for n in range(40):
        begin(ledger, f"silent-{n}", now)
        begin(ledger, f"seen-{n}", now, silent=False)
        ledger.first_token(f"seen-{n}", now + 6.0)
        now += 6.0
        ledger.finish(f"silent-{n}", now)
        ledger.finish(f"seen-{n}", now)
    assert ledger.rates.prefill(100, 0) == pytest.approx(3.0, rel=0.1)


def test_answer_that_comes_before_its_predicted_time_ends_its_prefill(ledger: EngineLedger) -> None:
    begin(ledger, "a", 0.0)
    ledger.finish("a", 0.1)
    assert ledger.prefill_queue(0.1) == 0.0
    assert ledger.silent_until > 1e9


def test_a_request_that_is_seen_is_never_taken_out_by_time(ledger: EngineLedger) -> None:
    begin(ledger, "a", 0.0, silent=False)
    begin(ledger, "b", 0.0)
    ledger.advance(100.0)
    assert ledger.queued == 2


def test_other_routers_work_and_the_engines_report_come_apart(ledger: EngineLedger) -> None:
    begin(ledger, "a", 0.0)
    ledger.report(1, 0, 0.5, 0.0)
    begin(ledger, "b", 0.0)
    ledger.report_others(5000, 3, 0.0)
    assert (ledger.begun, ledger.running) == (1, 2)
    assert ledger.prefill_tokens == 5200
    assert ledger.prefill_queue(0.0) == pytest.approx(5.0)
