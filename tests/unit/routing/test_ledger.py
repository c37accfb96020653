from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.routing.engines import engine, keys, send
from vllm_pd.routing.ledger import EngineLedger
from vllm_pd.routing.model import NO_OVERLAP, Ask, Overlap
from vllm_pd.routing.predict import LONGEST_PATIENCE, overtaken


def test_queue_shrinks_as_time_passes() -> None:
    ledger = engine("a")
    send(ledger, "r", 1000, 10.0)
    assert ledger.prefill_queue(10.0) == pytest.approx(1.0)
    assert ledger.prefill_queue(10.4) == pytest.approx(0.6)


def test_requests_wait_for_those_before_them() -> None:
    ledger = engine("a")
    for name in "abc":
        send(ledger, name, 1000, 0.0)
    assert ledger.prefill_queue(0.0) == pytest.approx(3.0)
    assert ledger.prefill_tokens == 3000


def test_cached_blocks_are_no_work() -> None:
    ledger = engine("a")
    send(ledger, "r", 1000, 0.0, held=60)
    assert ledger.prefill_queue(0.0) == pytest.approx(0.4)


def test_engine_computes_the_last_block_of_a_prompt_that_it_holds_whole() -> None:
    ledger = engine("a")
    send(ledger, "r", 1000, 0.0, held=100)
    assert ledger.prefill_tokens == 10


def test_a_request_that_takes_longer_than_predicted_does_not_make_the_queue_look_empty() -> None:
    ledger = engine("a")
    send(ledger, "late", 1000, 0.0)
    send(ledger, "next", 500, 0.0)
    assert ledger.prefill_queue(0.9) == pytest.approx(0.1 + 0.5)
    assert ledger.prefill_queue(2.9) == pytest.approx(0.1 + 0.5 + 1.0)


def test_first_token_corrects_the_prediction() -> None:
    ledger = engine("a")
    send(ledger, "early", 1000, 0.0)
    send(ledger, "next", 500, 0.0)
    ledger.first_token("early", 0.2)
    assert ledger.prefill_queue(0.2) == pytest.approx(0.5)
    assert (ledger.decoding, ledger.queued) == (1, 1)


def test_cancelled_work_leaves_the_queue() -> None:
    ledger = engine("a")
    send(ledger, "first", 1000, 0.0)
    send(ledger, "gone", 1000, 0.0)
    ledger.finish("gone", 0.5)
    assert ledger.prefill_queue(0.5) == pytest.approx(0.5)
    assert ledger.inflight == 1


def test_inexact_prompts_are_credited_with_nothing() -> None:
    ledger = engine("a")
    ledger.begin("r", Ask(1000, 10, exact=False), Overlap(50), 0.0)
    assert ledger.prefill_tokens == 1000


def test_remote_prefill_is_no_prefill_work() -> None:
    ledger = engine("a")
    send(ledger, "r", 1000, 0.0, remote=True)
    assert ledger.prefill_queue(0.0) == 0.0
    assert (ledger.active_blocks, ledger.inflight) == (100, 1)


def test_hand_over_is_measured_from_the_end_of_the_prefill() -> None:
    ledger = engine("a")
    for n in range(10):
        send(ledger, f"r{n}", 1000, n * 10.0, remote=True)
        ledger.prefilled(f"r{n}", n * 10.0 + 5.0)
        ledger.first_token(f"r{n}", n * 10.0 + 5.2)
        ledger.finish(f"r{n}", n * 10.0 + 6.0)
    assert ledger.rates.transfer(100) == pytest.approx(0.2, rel=0.2)


def test_the_wait_for_room_is_no_hand_over_time() -> None:
    """Else decode workers that were full once would compute all prompts themselves from then on, and learn nothing."""
    ledger = engine("a")
    ledger.kv_blocks = 1000
    for n in range(20):
        at = n * 100.0
        ledger.report(9, 0, 0.85, at)
        for name in ("fits", "waits"):
            send(ledger, f"{name}{n}", 1000, at, remote=True)
            ledger.prefilled(f"{name}{n}", at + 5.0)
        ledger.first_token(f"fits{n}", at + 5.2)
        ledger.first_token(f"waits{n}", at + 65.0)
        ledger.finish(f"fits{n}", at + 66.0)
        ledger.finish(f"waits{n}", at + 66.0)
    assert ledger.rates.transfer(100) == pytest.approx(0.2, rel=0.2)


def test_rates_are_learned_behind_a_queue_without_counting_the_queue() -> None:
    """Ten requests at once: the last waits nine times its own work, but each took two seconds."""
    ledger = engine("a")
    for start in (0.0, 100.0, 200.0):
        for n in range(10):
            send(ledger, f"{start}-{n}", 1000, start)
        for n in range(10):
            ledger.first_token(f"{start}-{n}", start + 2.0 * (n + 1))
    assert ledger.rates.prefill(1000, 0) == pytest.approx(2.0, rel=0.1)


def test_requests_computed_in_one_step_are_one_observation() -> None:
    """The first tokens of a batch come together: none of it took no time."""
    ledger = engine("a")
    for step in range(40):
        for n in range(4):
            send(ledger, f"{step}-{n}", 250, step * 10.0)
        for n in range(4):
            ledger.first_token(f"{step}-{n}", step * 10.0 + 1.0)
    assert ledger.rates.prefill(250, 0) == pytest.approx(0.25, rel=0.15)


def test_nothing_is_learned_while_others_may_be_served() -> None:
    ledger = engine("a")
    for n in range(20):
        ledger.report_others(100_000, 20, n * 10.0)
        send(ledger, f"r{n}", 1000, n * 10.0)
        ledger.first_token(f"r{n}", n * 10.0 + 9.0)
    assert ledger.rates.prefill(1000, 0) == pytest.approx(1.0)


def test_other_routers_work_counts_and_shrinks() -> None:
    ledger = engine("a")
    ledger.report_others(2000, 2, 0.0)
    assert ledger.prefill_tokens == 2000
    assert ledger.prefill_queue(0.0) == pytest.approx(2.0)
    assert ledger.prefill_queue(1.5) == pytest.approx(0.5)


def test_waiting_requests_that_no_router_told_of_count() -> None:
    ledger = engine("a")
    ledger.report(running=8, waiting=5, kv_usage=0.5, now=0.0)
    assert ledger.prefill_queue(0.0) > 0
    own = engine("b")
    for n in range(5):
        send(own, f"r{n}", 10, 0.0)
    own.report(running=1, waiting=5, kv_usage=0.5, now=0.0)
    assert own.prefill_queue(0.0) == pytest.approx(0.05)


def test_load_report_is_corrected_by_what_was_sent_and_ended_since() -> None:
    ledger = engine("a")
    for n in range(3):
        send(ledger, f"r{n}", 100, 0.0)
    ledger.report(running=3, waiting=0, kv_usage=0.1, now=1.0)
    send(ledger, "r3", 100, 1.5)
    assert (ledger.running, ledger.begun, ledger.begun_blocks) == (4, 1, 10)
    for n in range(3):
        ledger.finish(f"r{n}", 2.0)
    assert ledger.running == 1


def test_siblings_find_the_blocks_that_the_first_is_computing() -> None:
    ledger = engine("a")
    shared = Ask(105, 10, keys=keys(*range(10)))
    other = Ask(105, 10, keys=keys(0, 1, 2, *range(13, 20)))
    ledger.begin("first", shared, NO_OVERLAP, 0.0)
    assert ledger.promised_after(0, shared) == 10
    assert ledger.promised_after(0, other) == 3
    assert ledger.promised_after(4, shared) == 6
    ledger.begin("second", shared, NO_OVERLAP, 0.0)
    assert ledger.prefill_tokens == 105 + 5
    ledger.first_token("first", 0.1)
    ledger.first_token("second", 0.2)
    assert ledger.promised_after(0, shared) == 0
    assert not ledger.promised


class TestOrdered:
    """An engine that computes waiting requests in the order of the turns that the router gives them."""

    def ledger(self) -> EngineLedger:
        return engine("a", ordered=True)

    def test_short_request_goes_before_a_long_one_that_waits(self) -> None:
        ledger = self.ledger()
        send(ledger, "computed", 100, 0.0, patience=2.0)
        send(ledger, "long", 5000, 0.0, patience=2.0)
        assert overtaken(ledger.turns, 0.2) == (5.0, 1)
        send(ledger, "short", 100, 0.0, patience=2.0)
        assert [seconds for _, seconds in ledger.turns] == pytest.approx([0.1, 5.0])
        assert ledger.prefill_queue(0.0) == pytest.approx(5.2)

    def test_what_is_computed_already_is_not_overtaken(self) -> None:
        ledger = self.ledger()
        send(ledger, "long", 5000, 0.0, patience=2.0)
        assert not ledger.turns
        send(ledger, "short", 100, 0.0, patience=2.0)
        ledger.first_token("long", 5.0)
        assert ledger.prefill_queue(5.0) == pytest.approx(0.1)

    def test_patience_has_an_end(self) -> None:
        ledger = self.ledger()
        send(ledger, "computed", 100, 0.0)
        assert send(ledger, "long", 1000, 0.0, patience=2.0) == pytest.approx(2.0)
        assert send(ledger, "soon", 100, 1.7, patience=2.0) == pytest.approx(1.9)
        assert send(ledger, "late", 100, 1.9, patience=2.0) == pytest.approx(2.1)
        assert [turn for turn, _ in ledger.turns] == pytest.approx([1.9, 2.0, 2.1])

    def test_prediction_out_of_all_proportion_makes_nobody_wait_for_ever(self) -> None:
        ledger = self.ledger()
        send(ledger, "computed", 100, 0.0, patience=2.0)
        assert send(ledger, "long", 10**6, 0.0, patience=2.0) == LONGEST_PATIENCE

    def test_without_patience_all_come_as_they_came(self) -> None:
        ledger = self.ledger()
        for n, tokens in enumerate((500, 5000, 100)):
            assert send(ledger, str(n), tokens, n * 0.01) == n * 0.01
        assert [seconds for _, seconds in ledger.turns] == pytest.approx([5.0, 0.1])

    def test_request_that_builds_on_one_that_waits_does_not_go_before_it(self) -> None:
        ledger = self.ledger()
        send(ledger, "computed", 100, 0.0)
        ask = Ask(1005, 10, keys=keys(*range(100)))
        first = ledger.begin("first", ask, NO_OVERLAP, 0.0, patience=2.0)
        second = ledger.begin("second", ask, NO_OVERLAP, 0.0, patience=2.0)
        assert second >= first
        assert [seconds for _, seconds in ledger.turns] == pytest.approx([1.005, 0.005])

    def test_engine_that_takes_requests_as_they_come_has_no_turns(self) -> None:
        ledger = engine("a")
        for name in "abc":
            assert send(ledger, name, 1000, 3.0, patience=2.0) == 3.0
        assert not ledger.turns


def test_a_name_in_progress_is_an_error_and_an_unknown_one_is_ignored() -> None:
    ledger = engine("a")
    send(ledger, "r", 10, 0.0)
    with pytest.raises(ValueError, match="name of its own"):
        send(ledger, "r", 10, 0.0)
    ledger.first_token("x", 0.0)
    ledger.prefilled("x", 0.0)
    ledger.finish("x", 0.0)
    assert ledger.inflight == 1


def test_requests_of_others_are_what_the_report_counts_beyond_ones_own() -> None:
    ledger = engine("a")
    send(ledger, "mine", 100, 0.0)
    ledger.first_token("mine", 0.1)
    ledger.report(running=4, waiting=0, kv_usage=0.1, now=0.5)
    assert ledger.decoding == 1 + 3
    send(ledger, "short", 100, 1.0)
    ledger.first_token("short", 1.1)
    ledger.finish("short", 1.2)
    # The report may be of the time when it ran.
    ledger.report(running=2, waiting=0, kv_usage=0.1, now=1.5)
    assert ledger.decoding == 1
    ledger.finish("mine", 1.6)
    assert ledger.decoding == 0


class DrainsToNothing(RuleBasedStateMachine):
    """Whatever happens to requests in whatever order, what is over leaves no trace."""

    @initialize()
    def start(self) -> None:
        self.ledger = engine("a", ordered=True)
        self.now = 0.0
        self.names: list[str] = []
        self.sent = 0

    @rule(
        tokens=st.integers(0, 5000),
        remote=st.booleans(),
        silent=st.booleans(),
        first=st.integers(0, 3),
        patience=st.sampled_from([0.0, 2.0]),
    )
    def begin(self, tokens: int, remote: bool, silent: bool, first: int, patience: float) -> None:
        self.sent += 1
        ask = Ask(tokens, 10, keys=keys(*range(first, first + tokens // 10)))
        self.ledger.begin(str(self.sent), ask, NO_OVERLAP, self.now, remote=remote, silent=silent, patience=patience)
        self.names.append(str(self.sent))

    @rule(data=st.data(), what=st.sampled_from(["prefilled", "first_token", "finish"]))
    def go_on(self, data: st.DataObject, what: str) -> None:
        if self.names:
            name = data.draw(st.sampled_from(self.names))
            getattr(self.ledger, what)(name, self.now)
            if what == "finish":
                self.names.remove(name)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.ledger.silent_until:
            self.ledger.advance(self.now)

    @invariant()
    def counts_agree(self) -> None:
        ledger = self.ledger
        assert ledger.inflight == len(self.names)
        assert ledger.prefill_queue(self.now) >= 0
        assert ledger.own_prefill_tokens >= 0
        turns = [turn for turn, _ in ledger.turns]
        assert turns == sorted(turns)

    def teardown(self) -> None:
        for name in self.names:
            self.ledger.finish(name, self.now)
        ledger = self.ledger
        assert (ledger.inflight, ledger.decoding, ledger.queued, ledger.active_blocks) == (0, 0, 0, 0)
        assert ledger.prefill_queue(self.now) == 0
        assert ledger.own_prefill_tokens == 0
        assert not ledger.promised


DrainsToNothing.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestDrainsToNothing = DrainsToNothing.TestCase
