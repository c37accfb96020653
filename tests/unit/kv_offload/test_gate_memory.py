"""A tier that was refused is tried again, and what that costs is bounded."""

from __future__ import annotations

import dataclasses

import pytest

from vllm_pd.kv_offload.cost_gate import Beliefs, Decision, Prompt, Reason, Run, Tier, decide, told
from vllm_pd.kv_offload.gate_memory import PROBE_SHARE, GateMemory
from vllm_pd.kv_offload.load_rates import SSD_PRIOR, LoadRate, LoadSpeed
from vllm_pd.kv_offload.prefill_rate import PrefillSpeed

PREFILL = PrefillSpeed(base_s=0.005, token_s=1e-4, pair_s=0.0, sequence_s=1e-4)
FAST, STUCK = LoadSpeed(1e-3, 5e9), LoadSpeed(5.0, 1e6)
BELIEFS = Beliefs(prefill=PREFILL, cpu=FAST, ssd=STUCK, block_bytes=65536, step_tokens=2048)
PROMPT = Prompt(tokens=1380, computed=0, block_tokens=32, runs=(Run(Tier.CPU, 20), Run(Tier.SSD, 20)))


def ask(memory: GateMemory, beliefs: Beliefs = BELIEFS, prompt: Prompt = PROMPT) -> Decision:
    decision = decide(prompt, beliefs, refused=memory.refused, avoided=memory.avoided, probe=memory.due)
    memory.decided(decision, beliefs)
    return decision


def test_a_refused_tier_is_tried_now_and_then_and_the_others_are_left_alone() -> None:
    memory = GateMemory()
    decisions = [ask(memory) for _ in range(200)]
    probes = [d for d in decisions if d.parts[1].load]
    assert 4 <= len(probes) <= 200 * PROBE_SHARE + 1
    assert {d.parts[1].reason for d in probes} == {Reason.PROBE}
    assert all(d.parts[0].reason is Reason.FASTER for d in decisions)
    assert memory.refused == {Tier.SSD}


def test_a_tier_that_is_only_a_little_slower_is_tried_sooner_than_one_that_is_stuck() -> None:
    def until_probe(ssd: LoadSpeed) -> int:
        memory, beliefs = GateMemory(), dataclasses.replace(BELIEFS, ssd=ssd)
        return next(i for i in range(1000) if ask(memory, beliefs).parts[1].load)

    assert until_probe(LoadSpeed(0.08, 5e9)) < until_probe(STUCK)


def test_a_tier_that_recovered_is_believed_again_after_a_few_probes() -> None:
    """One second of a stalled disk, then as fast as ever: the load rate is fed by probes alone."""
    memory, rate = GateMemory(), LoadRate(SSD_PRIOR)
    size = 20 * BELIEFS.block_bytes
    for _ in range(20):
        rate.observe(size, 1.0)
    asked = loads = 0
    while asked < 400:
        asked += 1
        beliefs = dataclasses.replace(BELIEFS, ssd=rate.speed)
        decision = ask(memory, beliefs)
        if decision.parts[1].load:
            loads += 1
            predicted_s = rate.predict_s(size)
            rate.observe(size, 0.002)
            memory.loaded(Tier.SSD, predicted_s, 0.002)
        if decision.parts[1].reason is Reason.FASTER:
            break
    assert decision.parts[1].reason is Reason.FASTER
    assert asked < 60 and loads < 40
    assert memory.refused == frozenset()


def test_a_probe_that_shows_nothing_better_is_followed_by_none() -> None:
    memory = GateMemory()
    while not ask(memory).parts[1].load:
        pass
    memory.loaded(Tier.SSD, 5.0, 5.0)
    assert not ask(memory).parts[1].load


def ask_late(memory: GateMemory, beliefs: Beliefs) -> Decision:
    """As `ask`, from an SSD that never answers in time."""
    decision = decide(PROMPT, beliefs, refused=memory.refused, avoided=memory.avoided, probe=memory.due)
    if decision.loads_all:
        decision = told(PROMPT, beliefs, 20, Reason.FASTER, Reason.LATE)
    memory.decided(decision, beliefs)
    return decision


@pytest.mark.parametrize("ssd", [FAST, None], ids=["believed to be fast", "unknown"])
def test_a_tier_that_hangs_is_avoided_after_two_loads_and_tried_now_and_then(ssd: LoadSpeed | None) -> None:
    """Whatever its rate says: a load that never ends is not measured."""
    memory, beliefs = GateMemory(), dataclasses.replace(BELIEFS, ssd=ssd)
    reasons = [ask_late(memory, beliefs).parts[1].reason for _ in range(162)]
    assert reasons[:3] == [Reason.LATE, Reason.LATE, Reason.AVOIDED]
    assert 5 <= reasons.count(Reason.LATE) - 2 <= 160 * PROBE_SHARE + 1


def test_a_tier_that_was_avoided_is_used_again_after_one_load_that_came_in_time() -> None:
    memory, beliefs = GateMemory(), dataclasses.replace(BELIEFS, ssd=FAST)
    for _ in range(5):
        ask_late(memory, beliefs)
    assert memory.avoided == {Tier.SSD}
    while not ask(memory, beliefs).loads_all:
        pass
    assert memory.avoided == frozenset()
    assert ask(memory, beliefs).parts[1].reason is Reason.FASTER


def test_a_tier_behind_one_that_is_late_is_not_to_blame() -> None:
    memory = GateMemory()
    prompt = dataclasses.replace(PROMPT, runs=(Run(Tier.SSD, 20), Run(Tier.CPU, 20)))
    for _ in range(5):
        memory.decided(told(prompt, BELIEFS, 0, Reason.FASTER, Reason.LATE), BELIEFS)
    assert memory.avoided == {Tier.SSD}


def test_what_somebody_forbade_saves_up_for_no_probe() -> None:
    memory = GateMemory()
    for _ in range(1000):
        memory.decided(told(PROMPT, BELIEFS, 0, Reason.ALWAYS, Reason.NEVER), BELIEFS)
    assert memory.due == frozenset()
