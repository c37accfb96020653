"""Rules by name, and what each makes of a request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.routing.engines import SIMPLE, engine, send
from vllm_pd.errors import SettingsError
from vllm_pd.routing.choose import choose
from vllm_pd.routing.ledger import EngineLedger
from vllm_pd.routing.model import Ask, Choice, Overlap
from vllm_pd.routing.plan import Plan, plan
from vllm_pd.routing.policies import POLICIES
from vllm_pd.routing.policies.predicted import Predicted
from vllm_pd.routing.split_policy import Partners, SplitPolicy
from vllm_pd.routing.split_rule import Disagg, SplitRule, split_rule
from vllm_pd.state.base import Role

ASK = Ask(1000, 10)
PREDICTED = POLICIES["predicted"]
AUTO = split_rule("auto")


def decoder(name: str = "d", **load: int) -> EngineLedger:
    return engine(name, role=Role.DECODE, **load)


def prefiller(name: str = "p", *, queued: int = 0, **load: int) -> EngineLedger:
    made = engine(name, role=Role.PREFILL, **load)
    if queued:
        send(made, "r", queued, 0.0)
    return made


def made(rule: SplitRule, one: EngineLedger, other: EngineLedger, held: int = 0, ask: Ask = ASK) -> Plan:
    return plan(PREDICTED, ask, [one], [other], {one.holder: Overlap(held)} if held else {}, 0.0, rule=rule)


@pytest.mark.parametrize(
    ("name", "limit", "options", "words"),
    [
        ("atuo", None, (), "no rule 'atuo' (did you mean 'auto'?); choose auto, always"),
        ("threshold", None, (), "needs its number of tokens: give --max-local-prefill-tokens"),
        ("auto", None, (("stal", 1.0),), "has no option 'stal' (did you mean 'stall'?); it has max_wait, stall"),
        ("auto", None, (("ratio", 1.0),), "has no option 'ratio'"),
        ("never", None, (("stall", 1.0),), "it has none"),
    ],
)
def test_mistake_is_one_sentence_that_says_what_to_change(
    name: str, limit: int | None, options: tuple[tuple[str, float], ...], words: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        split_rule(name, limit, options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "limit", "tokens"),
    [("auto", None, 0), ("auto", 64, 64), ("dynamo-old", None, 1000), ("dynamo-new", None, 2048), ("dynamo-new", 9, 9)],
)
def test_each_rule_has_its_own_usual_limit(name: str, limit: int | None, tokens: int) -> None:
    assert split_rule(name, limit).max_local_tokens == tokens


@pytest.mark.parametrize("name", Disagg)
def test_rest_below_one_block_is_split_by_no_rule(name: Disagg) -> None:
    rule = split_rule(name, 0)
    assert not made(rule, decoder(decoding=50), prefiller(), 100, Ask(1005, 10)).remote


@pytest.mark.parametrize("policy", POLICIES)
def test_never_is_never(policy: str) -> None:
    one = plan(POLICIES[policy], ASK, [decoder()], [prefiller()], {}, 0.0, rule=split_rule("never"))
    assert (one.remote, one.reason) == (False, "never")
    assert plan(POLICIES[policy], ASK, [decoder()], [], {}, 0.0, rule=split_rule("never")).reason == "no prefill worker"


@pytest.mark.parametrize(("wait", "reason"), [(0, "split"), (1, "split"), (0.5, "prefill busy")])
def test_threshold_splits_only_what_the_prefill_worker_can_begin_in_time(wait: float, reason: str) -> None:
    busy = prefiller(queued=800)
    rule = split_rule("threshold", 100, (("max_wait", wait),))
    assert made(rule, decoder(), busy).reason == reason
    assert made(rule, decoder(), busy, 90).reason == "short"


# By time.


def test_an_idle_decode_worker_prefills_itself_and_one_that_decodes_does_not() -> None:
    idle = made(AUTO, decoder(), prefiller())
    assert (idle.reason, idle.ttft) == ("sooner whole", pytest.approx(1.0))
    assert idle.weighed is not None
    # Each counts its own second twice, once for those who come after.
    assert (idle.weighed.here, idle.weighed.there) == (pytest.approx(2.0), pytest.approx(2.01))
    busy = made(AUTO, decoder(decoding=1), prefiller())
    assert busy.weighed is not None
    assert (busy.reason, busy.weighed.here) == ("split", pytest.approx(2.5))


@pytest.mark.parametrize(("decoding", "reason"), [(1, "sooner whole"), (2, "sooner whole"), (3, "split")])
def test_a_little_work_is_done_where_it_stalls_few(decoding: int, reason: str) -> None:
    """Ten tokens stall each sequence for 10 ms, of which a half counts; the hand-over takes 10 ms."""
    one, other = decoder(decoding=decoding), prefiller()
    overlaps = {one.holder: Overlap(99), other.holder: Overlap(99)}
    assert plan(PREDICTED, ASK, [one], [other], overlaps, 0.0, rule=AUTO).reason == reason


def test_what_only_the_decode_worker_holds_speaks_for_doing_it_here() -> None:
    assert made(AUTO, decoder(decoding=3), prefiller()).reason == "split"
    assert made(AUTO, decoder(decoding=3), prefiller(), 50).reason == "sooner whole"


def test_prefill_queue_speaks_for_doing_it_here() -> None:
    assert made(AUTO, decoder(decoding=4), prefiller(queued=1900)).reason == "split"
    assert made(AUTO, decoder(decoding=4), prefiller(queued=2100)).reason == "sooner whole"


def test_those_on_their_way_to_a_decode_worker_will_decode_there() -> None:
    one = decoder()
    for n in range(3):
        send(one, f"r{n}", 1000, 0.0, remote=True)
    assert one.decoding == 0
    assert made(AUTO, one, prefiller()).reason == "split"


def test_hand_over_of_what_the_decode_worker_holds_costs_nothing() -> None:
    rates = replace(SIMPLE, transfer_block=0.01)
    one = engine("d", role=Role.DECODE, rates=rates, decoding=2)
    other = engine("p", role=Role.PREFILL, rates=rates)
    overlaps = {one.holder: Overlap(50), other.holder: Overlap(50)}
    weighed = plan(PREDICTED, ASK, [one], [other], overlaps, 0.0, rule=AUTO).weighed
    assert weighed is not None
    assert weighed.transfer == pytest.approx(0.01 + 50 * 0.01)


def test_limit_and_wait_bound_what_is_weighed() -> None:
    busy = decoder(decoding=50)
    assert made(split_rule("auto", 1000), busy, prefiller()).reason == "short"
    assert made(split_rule("auto", None, (("max_wait", 0.5),)), busy, prefiller(queued=600)).reason == "prefill busy"


def test_sequences_of_a_prefill_worker_that_decodes_too_are_counted() -> None:
    one, other = engine("a", decoding=10), engine("b", decoding=12)
    assert plan(PREDICTED, ASK, [one], [one, other], {}, 0.0, rule=AUTO).reason == "sooner whole"
    other.decoding = 2
    assert plan(PREDICTED, ASK, [one], [one, other], {}, 0.0, rule=AUTO).reason == "split"


# Dynamo's.


@pytest.mark.parametrize(
    ("tokens", "held", "waiting", "reason"),
    [
        (1000, 0, 0, "short"),
        (1010, 0, 0, "split"),
        (2000, 100, 0, "short"),
        (3000, 0, 1, "split"),
        (3000, 0, 2, "busy"),
    ],
)
def test_old_rule_of_dynamo(tokens: int, held: int, waiting: int, reason: str) -> None:
    found = made(split_rule("dynamo-old"), decoder(), prefiller(waiting=waiting), held, Ask(tokens, 10))
    assert found.reason.removeprefix("prefill ") == reason


def test_old_rule_counts_the_queue_of_all_prefill_workers() -> None:
    first, second = prefiller("p1"), prefiller("p2")
    for n in range(2):
        # The first of each is being computed.
        send(first, f"a{n}", 5000, 0.0)
        send(second, f"b{n}", 5000, 0.0)
    rule = split_rule("dynamo-old")
    assert plan(PREDICTED, Ask(3000, 10), [decoder()], [first, second], {}, 0.0, rule=rule).reason == "prefill busy"
    second.finish("b1", 0.0)
    assert plan(PREDICTED, Ask(3000, 10), [decoder()], [first, second], {}, 0.0, rule=rule).reason == "split"


@pytest.mark.parametrize(
    ("held", "waiting", "blocks", "reason"),
    [
        (30, 0, 0, "split"),
        (31, 0, 0, "short"),
        (0, 4000, 0, "split"),
        (0, 4001, 0, "prefill busy"),
        (31, 0, 901, "split"),
        (0, 4001, 901, "split"),
    ],
)
def test_new_rule_of_dynamo(held: int, waiting: int, blocks: int, reason: str) -> None:
    rule = split_rule("dynamo-new", None, (("prefill_busy", 4000.0), ("decode_busy", 0.9)))
    one, other = decoder(active_blocks=blocks), prefiller(prefill_tokens=waiting)
    assert made(rule, one, other, held).reason == reason


# What is scored for all at once is what is judged of one.

overlaps = st.builds(Overlap, st.integers(0, 60), st.integers(0, 30), st.integers(0, 30))
shapes = st.lists(
    st.tuples(st.sampled_from(Role), st.integers(0, 3), st.integers(0, 6), overlaps), min_size=2, max_size=6
)


@given(st.sampled_from(Disagg), shapes, st.integers(1, 1300), st.sampled_from([0.0, 0.4]))
def test_scores_are_those_of_the_way_that_is_judged_best(
    name: Disagg, shape: list[tuple[Role, int, int, Overlap]], tokens: int, max_wait: float
) -> None:
    rule = replace(split_rule(name, 50), max_wait=max_wait)
    engines = [engine(f"w{n}", role=role, decoding=decoding) for n, (role, _, decoding, _) in enumerate(shape)]
    for each, (_, queued, _, _) in zip(engines, shape, strict=True):
        for n in range(queued):
            send(each, f"r{n}", 300, 0.0)
    known = {each.holder: overlap for each, (*_, overlap) in zip(engines, shape, strict=True) if overlap.blocks}
    ask, policy, now = Ask(tokens, 10), Predicted(), 0.1

    def pick(usable: list[EngineLedger]) -> Choice:
        return choose(policy, ask, usable, known, now)

    partners = Partners(
        [each for each in engines if each.role.prefills],
        pick,
        policy,
        ask,
        known,
        now,
        rule,  # type: ignore[arg-type]
    )
    leg = SplitPolicy(policy, ask, known, now, rule, partners)
    decoders = [each for each in engines if each.role.decodes]
    for index, score in enumerate(leg.scores(ask, decoders, known, now)):
        assert sum(leg.parts(index, ask, decoders, known, now).values()) == pytest.approx(score)
