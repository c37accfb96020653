from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.unit.routing.engines import SIMPLE, engine, send
from vllm_pd.routing.ledger import EngineLedger
from vllm_pd.routing.model import Ask, Overlap
from vllm_pd.routing.plan import plan
from vllm_pd.routing.policies import POLICIES
from vllm_pd.routing.split_rule import Disagg, SplitRule
from vllm_pd.state.base import Role, WorkerId

ASK = Ask(1000, 10)
PREDICTED = POLICIES["predicted"]


def decoder(name: str, **load: int) -> EngineLedger:
    return engine(name, role=Role.DECODE, **load)


def prefiller(name: str, **load: int) -> EngineLedger:
    return engine(name, role=Role.PREFILL, **load)


@pytest.mark.parametrize("name", POLICIES)
def test_splits_where_there_is_a_prefill_worker(name: str) -> None:
    made = plan(POLICIES[name], ASK, [decoder("d")], [prefiller("p")], {}, 0.0)
    assert made.remote
    assert made.prefill is not None
    assert (made.decode.best.holder.worker, made.prefill.best.holder.worker, made.reason) == ("d", "p", "split")
    assert made.ttft == pytest.approx(1.0 + 0.01)


def test_goes_whole_without_one() -> None:
    made = plan(PREDICTED, ASK, [decoder("d")], [], {}, 0.0)
    assert (made.remote, made.reason, made.ttft) == (False, "no prefill worker", pytest.approx(1.0))


def test_prefill_worker_of_another_pool_is_none() -> None:
    made = plan(PREDICTED, ASK, [decoder("d")], [engine("p", pool="other")], {}, 0.0)
    assert (made.prefill, made.reason) == (None, "no prefill worker")


def test_each_pool_has_its_own_prefill_worker() -> None:
    decoders = [engine("d1", pool="one", inflight=1), engine("d2", pool="two")]
    prefillers = [engine("p1", pool="one"), engine("p2", pool="two")]
    made = plan(PREDICTED, ASK, decoders, prefillers, {}, 0.0)
    assert made.prefill is not None
    assert (made.decode.best.holder.worker, made.prefill.best.holder.worker) == ("d2", "p2")


def test_a_worker_does_not_prefill_for_itself() -> None:
    engines = [engine("a"), engine("b")]
    made = plan(PREDICTED, ASK, engines, engines, {}, 0.0)
    assert made.prefill is not None
    assert made.decode.best.holder != made.prefill.best.holder
    alone = plan(PREDICTED, ASK, engines[:1], engines[:1], {}, 0.0)
    assert alone.reason == "no prefill worker"


@pytest.mark.parametrize(
    ("held", "limit", "reason"),
    [(98, 0, "split"), (99, 0, "split"), (100, 0, "split"), (90, 100, "short"), (90, 99, "split"), (0, 1000, "short")],
)
def test_short_rest_is_prefilled_where_it_is_decoded(held: int, limit: int, reason: str) -> None:
    """The engine computes the last block even of a prompt it holds whole; 10 tokens are not below one block."""
    one = decoder("d")
    made = plan(
        PREDICTED,
        ASK,
        [one],
        [prefiller("p")],
        {one.holder: Overlap(held)},
        0.0,
        rule=SplitRule(max_local_tokens=limit),
    )
    assert made.reason == reason


def test_rest_below_one_block_is_never_split() -> None:
    one = decoder("d")
    made = plan(PREDICTED, Ask(1005, 10), [one], [prefiller("p")], {one.holder: Overlap(100)}, 0.0)
    assert made.reason == "short"


def test_hand_over_counts_only_blocks_that_the_decode_worker_lacks() -> None:
    rates = replace(SIMPLE, transfer_block=0.001)
    decoders = [engine("d1", rates=rates), engine("d2", rates=rates)]
    made = plan(PREDICTED, ASK, decoders, [prefiller("p")], {decoders[1].holder: Overlap(40)}, 0.0, explain=True)
    assert made.decode.chosen == 1
    assert [scored.parts["transfer"] for scored in made.decode.scored] == pytest.approx([0.11, 0.07])


def test_prefill_goes_where_its_prefix_is_and_decode_where_fewer_decode() -> None:
    decoders, prefillers = [decoder("d1", inflight=9), decoder("d2")], [prefiller("p1"), prefiller("p2")]
    made = plan(PREDICTED, ASK, decoders, prefillers, {prefillers[1].holder: Overlap(50)}, 0.0)
    assert made.prefill is not None
    assert (made.decode.chosen, made.prefill.chosen) == (1, 1)
    assert made.ttft == pytest.approx(0.5 + 0.01)


def test_busy_prefill_workers_are_passed_by_only_if_the_rule_goes_by_time() -> None:
    one, busy = decoder("d"), prefiller("p")
    for n in range(5):
        send(busy, f"r{n}", 1000, 0.0)
    assert plan(PREDICTED, ASK, [one], [busy], {}, 0.0).reason == "split"
    made = plan(PREDICTED, ASK, [one], [busy], {}, 0.0, rule=SplitRule(Disagg.AUTO))
    assert (made.reason, made.ttft) == ("sooner whole", pytest.approx(1.0))


def test_stall_of_decoding_sequences_speaks_for_a_split() -> None:
    """The prefill worker's queue is a little longer than the hand-over saves, but forty sequences would stand still."""
    rule = SplitRule(Disagg.AUTO)
    queue = prefiller("p")
    send(queue, "r", 100, 0.0)
    assert plan(PREDICTED, ASK, [decoder("d")], [queue], {}, 0.0, rule=rule).reason == "sooner whole"
    assert plan(PREDICTED, ASK, [decoder("d", decoding=40)], [queue], {}, 0.0, rule=rule).reason == "split"


def test_answers_of_others_slow_ones_own() -> None:
    decoders = [decoder("d1"), decoder("d2")]
    decoders[0].report(running=20, waiting=0, kv_usage=0.2, now=0.0)
    for n in range(2):
        made = plan(PREDICTED, ASK, decoders, [prefiller("p")], {}, 0.0)
        assert (made.reason, made.decode.chosen) == ("split", 1)
        decoders[1].last_pick = n + 1


def test_session_stays_on_its_decode_worker() -> None:
    decoders = [decoder("d1"), decoder("d2", inflight=3)]
    made = plan(PREDICTED, replace(ASK, session=WorkerId("d2")), decoders, [prefiller("p")], {}, 0.0)
    assert (made.decode.chosen, made.decode.reason) == (1, "session")


def test_unknown_overlap_counts_for_nothing() -> None:
    one, far = decoder("d"), prefiller("p")
    overlaps = {one.holder: Overlap(100), far.holder: Overlap(100)}
    made = plan(PREDICTED, replace(ASK, exact=False), [one], [far], overlaps, 0.0)
    assert (made.reason, made.ttft) == ("split", pytest.approx(1.01))


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_plans_the_same(name: str) -> None:
    decoders, prefillers = [decoder(f"d{n}") for n in range(4)], [prefiller(f"p{n}") for n in range(4)]
    made = [
        plan(POLICIES[name], ASK, decoders, prefillers, {}, 0.0, temperature=1.0, random=Random(3)) for _ in range(2)
    ]
    assert made[0] == made[1]


def test_explanation_covers_both_legs() -> None:
    decoders, prefillers = [decoder("d1"), decoder("d2")], [prefiller("p1"), prefiller("p2")]
    made = plan(PREDICTED, ASK, decoders, prefillers, {}, 0.0, explain=True)
    assert made.prefill is not None
    for scored in made.decode.scored:
        assert set(scored.parts) == {
            "queue",
            "load",
            "prefill",
            "later",
            "disturbance",
            "overtaken",
            "transfer",
            "answer",
        }
        assert sum(scored.parts.values()) == pytest.approx(scored.score)
    assert len(made.prefill.scored) == 2
