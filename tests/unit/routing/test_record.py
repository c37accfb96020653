"""Decisions over several pools, and their records."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.errors import SettingsError
from vllm_pd.routing import policies
from vllm_pd.routing.decide import PoolAsk, decide
from vllm_pd.routing.ledger import EngineLedger
from vllm_pd.routing.model import Ask, Overlap
from vllm_pd.routing.record import DecisionRecord, read_record, record_of, repeat
from vllm_pd.routing.split_rule import SplitRule
from vllm_pd.state.base import PoolId, Role, WorkerId
from vllm_pd.state.block_index import Holder

NOW = 100.0
KEYS = [n.to_bytes(15, "big") for n in range(187)]


def engine(name: str, role: Role = Role.BOTH, *, pool: str = "p", rank: int = 0, queued: int = 0) -> EngineLedger:
    made = EngineLedger(Holder(WorkerId(name), rank), PoolId(pool), role, 1000)
    for n in range(queued):
        made.begin(n, Ask(3000, 16, keys=KEYS[:180]), Overlap(), NOW, pick=n)
    return made


def ask(pool: str, decoders: list[EngineLedger], prefillers: list[EngineLedger], **overlaps: Overlap) -> PoolAsk:
    known = {Holder(WorkerId(name)): overlap for name, overlap in overlaps.items()}
    return PoolAsk(PoolId(pool), Ask(2000, 16, keys=KEYS[:125]), decoders, prefillers, known, blocks=125, index_age=0.5)


def record(
    asks: list[PoolAsk], policy: str = "predicted", *, temperature: float = 0.0, seed: int = 7
) -> DecisionRecord:
    chosen = policies.policy(policy)
    rule = SplitRule(max_local_tokens=64)
    random = Random(seed) if temperature else None
    decision = decide(chosen, asks, NOW, rule=rule, temperature=temperature, random=random, explain=True)
    return record_of(
        asks,
        decision,
        request="r",
        path="/v1/completions",
        model="m",
        policy=chosen,
        temperature=temperature,
        seed=seed if temperature else None,
        rule=rule,
        forbidden="",
        reason="split",
        now=NOW,
    )


def through_json(made: DecisionRecord) -> DecisionRecord:
    return read_record(msgspec.json.encode(made))


def test_pool_with_the_lower_score_gets_the_request() -> None:
    one = ask("p", [engine("a", queued=3)], [])
    two = ask("q", [engine("b", pool="q", queued=1)], [])
    assert decide(policies.policy("predicted"), [one, two], NOW).pool == 1
    assert decide(policies.policy("predicted"), [two, one], NOW).pool == 0


def test_equal_pools_take_turns() -> None:
    one, two = engine("a"), engine("b", pool="q")
    one.last_pick, two.last_pick = 5, 3
    asks = [ask("p", [one], []), ask("q", [two], [])]
    assert decide(policies.policy("round-robin"), asks, NOW).pool == 1


overlaps = st.builds(Overlap, st.integers(0, 60), st.integers(0, 30), st.integers(0, 30))


@given(
    st.sampled_from(sorted(policies.POLICIES)),
    st.lists(st.tuples(st.sampled_from(Role), st.integers(0, 4), overlaps), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 1 << 40),
)
def test_decision_read_from_its_record_comes_out_the_same(
    policy: str, shape: list[tuple[Role, int, Overlap]], temperature: float, seed: int
) -> None:
    engines = [engine(f"w{n}", role, queued=queued) for n, (role, queued, _) in enumerate(shape)]
    decoders = [each for each in engines if each.role.decodes]
    if not decoders:
        return
    known = {f"w{n}": overlap for n, (_, _, overlap) in enumerate(shape) if overlap.blocks}
    asks = [ask("p", decoders, [each for each in engines if each.role.prefills], **known)]
    made = record(asks, policy, temperature=temperature, seed=seed)
    read = through_json(made)
    assert read == made
    assert repeat(read).same_as(made.outcome)
    assert repeat(read).decoders == made.outcome.decoders


def test_record_answers_what_another_policy_would_have_done() -> None:
    busy, idle = engine("busy", queued=4), engine("idle")
    made = through_json(record([ask("p", [busy, idle], [], busy=Overlap(gpu=100))], "prefix"))
    assert made.outcome.decode.worker == "busy"
    other = repeat(made, policies.policy("least-loaded"))
    assert other.decode.worker == "idle"
    assert not other.same_as(made.outcome)


def test_record_holds_what_is_needed_to_understand_it() -> None:
    made = record([ask("p", [engine("a", rank=1)], [engine("b", Role.PREFILL)])])
    value = json.loads(msgspec.json.encode(made))
    assert value["policy"] == "predicted"
    assert dict(value["weights"])["work"] == 1.0
    (pool,) = value["pools"]
    assert (pool["ask"]["tokens"], pool["blocks"], pool["index_age"]) == (2000, 125, 0.5)
    assert [(c["worker"], c["rank"]) for c in pool["candidates"]] == [("a", 1), ("b", 0)]
    assert (pool["decoders"], pool["prefillers"], pool["ask"]["keys"]) == ([0], [1], [])
    assert value["outcome"]["prefill"] == ["b", 0]
    assert value["outcome"]["decoders"][0]["parts"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "no record of a decision"),
        (b"[]", "no record of a decision"),
        (b"{}", "has format 0"),
        (b'{"format":99}', "has format 99"),
        (b'{"format":2}', "no record of a decision"),
        (b"\xff", "no record of a decision"),
    ],
)
def test_what_is_no_record_is_refused_in_one_sentence(text: bytes, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        read_record(text)


def test_record_of_a_policy_that_this_version_lacks_names_those_it_has() -> None:
    made = record([ask("p", [engine("a")], [])])
    with pytest.raises(SettingsError, match="no policy 'gone'; choose one of predicted"):
        repeat(msgspec.structs.replace(made, policy="gone"))
    assert replace(policies.policy("predicted"), work=3.0)
