"""The cost gate inside vLLM's scheduler: what is loaded, what is computed, and what is said about it.

The engine's clock is a made-up one: a step takes a millisecond, a computed token a tenth of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

pytest.importorskip("vllm")

from tests.unit.kv_offload.mini_engine import BLOCK_TOKENS, MiniEngine, answer, prompt, settle
from vllm_pd.connectors import pd_connector
from vllm_pd.connectors.offload_gate import OffloadGate
from vllm_pd.connectors.pd_connector import PDConnector
from vllm_pd.kv_offload import gate_metrics
from vllm_pd.kv_offload.cost_gate import Beliefs
from vllm_pd.kv_offload.load_rates import LoadSpeed
from vllm_pd.kv_offload.prefill_rate import PrefillSpeed
from vllm_pd.plugin import register
from vllm_pd.tier_choices import LoadGate

pytestmark = pytest.mark.vllm

FAST, SLOW = LoadSpeed(1e-4, 1e10), LoadSpeed(10.0, 1e10)
PREFILL = PrefillSpeed(base_s=1e-3, token_s=1e-4, pair_s=0.0, sequence_s=0.0)
Make = Callable[..., MiniEngine]


@pytest.fixture
def make(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    register()
    made: list[MiniEngine] = []
    clock = SimpleNamespace(monotonic=lambda: made[-1].delays.now, time=time.time, perf_counter=time.perf_counter)
    monkeypatch.setattr(pd_connector, "time", clock)

    def build(**options: Any) -> MiniEngine:
        made.append(MiniEngine(tiny_model, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.stop()


def gate_of(engine: MiniEngine) -> OffloadGate:
    gate = engine.connector._gate
    assert gate is not None
    return gate


def ask(engine: MiniEngine, name: str, tokens: list[int], **params: Any) -> None:
    """One answer; the GPU's cache is empty before and after."""
    engine.ask(name, tokens, length=1, **params)
    engine.run()
    settle(engine)
    assert engine.answers[name] == answer(tokens, 1)
    assert engine.scheduler.reset_prefix_cache()


def believe(engine: MiniEngine, cpu: LoadSpeed, ssd: LoadSpeed, prefill: PrefillSpeed = PREFILL) -> None:
    beliefs = Beliefs(prefill=prefill, cpu=cpu, ssd=ssd, block_bytes=512, step_tokens=256)
    gate_of(engine)._beliefs = lambda: beliefs  # type: ignore[method-assign]


def blocks_by_choice(engine: MiniEngine) -> dict[tuple[str, ...], float]:
    """What was counted: (tier, decision, reason) to blocks."""
    counted = engine.counted.data.get("OffloadingConnector")
    return {} if counted is None else dict(counted.data["data"].get(gate_metrics.BLOCKS, {}))


def on_both_tiers(make: Make, mode: LoadGate = LoadGate.AUTO) -> tuple[MiniEngine, list[int]]:
    """A prompt of ten blocks, all of them on the SSD and the first five in host memory too."""
    engine, wanted = make(gpu_blocks=60, cpu_blocks=12, below=True, mode=mode), prompt(10)
    believe(engine, FAST, SLOW)
    ask(engine, "wanted", wanted)
    ask(engine, "other", prompt(12, 1))
    ask(engine, "beginning", wanted[: 5 * BLOCK_TOKENS + 1])
    assert engine.tier is not None and not engine.tier.reads
    engine.worker.loads.clear()
    engine.counted.data.clear()
    engine.computed = 0
    return engine, wanted


def test_the_cpu_part_is_loaded_and_the_ssd_part_is_computed_where_the_ssd_is_slow(make: Make) -> None:
    engine, wanted = on_both_tiers(make)
    ask(engine, "again", wanted)
    assert [len(spec.block_ids) for spec in engine.worker.loads] == [5]
    assert engine.tier is not None and engine.tier.reads == []
    assert engine.computed == len(wanted) - 5 * BLOCK_TOKENS
    assert blocks_by_choice(engine) == {("cpu", "load", "faster"): 5, ("ssd", "compute", "slower"): 5}


def test_all_is_loaded_where_all_is_fast(make: Make) -> None:
    engine, wanted = on_both_tiers(make)
    believe(engine, FAST, FAST)
    ask(engine, "again", wanted)
    assert [len(spec.block_ids) for spec in engine.worker.loads] == [10]
    assert engine.tier is not None and len(engine.tier.reads) == 5
    assert blocks_by_choice(engine) == {("cpu", "load", "faster"): 5, ("ssd", "load", "faster"): 5}


@pytest.mark.parametrize(("mode", "loaded"), [(LoadGate.ALWAYS, [10]), (LoadGate.NEVER, [])])
def test_the_gate_can_be_told_what_to_do(make: Make, mode: LoadGate, loaded: list[int]) -> None:
    engine, wanted = make(gpu_blocks=60, cpu_blocks=30, mode=mode), prompt(10)
    ask(engine, "wanted", wanted)
    believe(engine, SLOW, SLOW)
    ask(engine, "again", wanted)
    assert [len(spec.block_ids) for spec in engine.worker.loads] == loaded
    choice = ("cpu", "load", "always") if loaded else ("cpu", "compute", "never")
    assert blocks_by_choice(engine) == {choice: 10}


def test_asking_changes_nothing_until_the_request_has_its_blocks(make: Make) -> None:
    engine, wanted = on_both_tiers(make)
    engine.ask("again", wanted, length=1)
    request = engine.scheduler.requests["again"]
    answers = [engine.connector.get_num_new_matched_tokens(request, 0) for _ in range(3)]
    assert answers == [(5 * BLOCK_TOKENS, True)] * 3
    assert blocks_by_choice(engine) == {} and not engine.worker.loads
    # Half of it came to the GPU meanwhile: the same choice, from there on.
    assert engine.connector.get_num_new_matched_tokens(request, 2 * BLOCK_TOKENS) == (3 * BLOCK_TOKENS, True)
    engine.run()
    assert blocks_by_choice(engine) == {("cpu", "load", "faster"): 5, ("ssd", "compute", "slower"): 5}


def test_a_load_that_is_waited_for_longer_than_computing_takes_is_given_up(make: Make) -> None:
    engine, wanted = on_both_tiers(make)
    believe(engine, FAST, FAST)
    engine.delays.tier = lambda: 400
    engine.ask("again", wanted, length=1)
    engine.run(until=lambda: bool(engine.answers["again"]))
    assert engine.answers["again"] == answer(wanted, 1)
    assert engine.delays.step < 300
    assert blocks_by_choice(engine) == {("cpu", "load", "faster"): 5, ("ssd", "compute", "late"): 5}
    assert engine.tier is not None and len(engine.tier.reads) == 5 and engine.tier.jobs
    settle(engine)


def test_a_tier_that_became_slow_is_left_alone_and_found_again_when_it_has_recovered(make: Make) -> None:
    """Nothing is told to the gate: it measures."""
    engine = make(gpu_blocks=60, cpu_blocks=12, below=True, mode=LoadGate.AUTO)
    wanted = [prompt(10, seed) for seed in range(3)]
    for number in range(9):
        ask(engine, f"first{number}", wanted[number % 3])

    def share_read(rounds: int, name: str) -> float:
        assert engine.tier is not None
        before = len(engine.tier.reads)
        for number in range(rounds):
            ask(engine, f"{name}{number}", wanted[number % 3])
        return (len(engine.tier.reads) - before) / (rounds * 10)

    assert share_read(9, "fast") > 0.6
    engine.delays.tier = lambda: 120
    share_read(6, "learning")
    assert share_read(24, "slow") < 0.2
    engine.delays.tier = lambda: 0
    share_read(40, "recovering")
    assert share_read(9, "again") > 0.6
    reasons = {reason for _, _, reason in blocks_by_choice(engine)}
    assert {"unknown", "faster", "late", "avoided", "probe"} <= reasons


def test_a_request_whose_blocks_are_handed_over_leaves_the_tiers_alone(make: Make) -> None:
    engine, wanted = on_both_tiers(make)
    believe(engine, FAST, FAST)
    engine.ask("handed over", wanted, length=1)
    request, gate = engine.scheduler.requests["handed over"], gate_of(engine)
    assert gate.before_lookup(request, 0, handed_over=True)
    tiers = engine.connector.sub_connectors[0]
    assert tiers.get_num_new_matched_tokens(request, 0) == (0, False)
    # The hand-off came to nothing.
    assert gate.before_lookup(request, 0, handed_over=False)
    assert tiers.get_num_new_matched_tokens(request, 0)[0] is None
    engine.run()
    assert engine.answers["handed over"] == answer(wanted, 1)


def test_a_client_may_allow_less(make: Make) -> None:
    engine, wanted = on_both_tiers(make)
    ask(engine, "again", wanted, kv_transfer_params={"max_load_tokens": 3 * BLOCK_TOKENS})
    assert [len(spec.block_ids) for spec in engine.worker.loads] == [3]
    assert blocks_by_choice(engine) == {("cpu", "load", "faster"): 3}


def test_a_preempted_request_is_decided_anew(make: Make) -> None:
    engine, wanted = make(gpu_blocks=20, cpu_blocks=60, mode=LoadGate.ALWAYS), prompt(10)
    ask(engine, "wanted", wanted)
    engine.counted.data.clear()
    for name in ("one", "two"):
        engine.ask(name, [*wanted[:-4], ord(name[0])], length=150)
    engine.run()
    assert engine.preemptions
    for name in ("one", "two"):
        assert engine.answers[name] == answer([*wanted[:-4], ord(name[0])], 150)
    assert not gate_of(engine)._asked


def test_decisions_reach_prometheus_by_tier_and_reason(make: Make) -> None:
    engine, wanted = on_both_tiers(make)
    engine.delays.now += 60
    ask(engine, "again", wanted)
    registry = CollectorRegistry()

    def into(kind: Any) -> Any:
        return lambda **options: kind(**options, registry=registry)

    classes = {Counter: into(Counter), Gauge: into(Gauge), Histogram: into(Histogram)}
    # What an API server does.
    shown = PDConnector.build_prom_metrics(engine.config, classes, ["model_name", "engine"], {0: ["m", "0"]})
    shown.observe({name: stats.data for name, stats in engine.counted.data.items()}, 0)
    text = generate_latest(registry).decode()
    labels = 'decision="compute",engine="0",model_name="m",reason="slower",tier="ssd"'
    assert f"vllm_pd_offload_gate_blocks_total{{{labels}}} 5.0" in text
    assert f"vllm_pd_offload_gate_decisions_total{{{labels}}} 1.0" in text
    assert 'vllm_pd_offload_break_even_tokens{engine="0",model_name="m",tier="cpu"} 32.0' in text


def test_an_explanation_is_logged_for_each_prompt(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine, wanted = on_both_tiers(make)
    with caplog.at_level("DEBUG", logger="vllm.vllm_pd.connectors.offload_gate"):
        ask(engine, "again", wanted)
    assert any(
        "request again: loads 5 blocks on cpu (faster), computes 5 blocks on ssd (slower)" in record.message
        for record in caplog.records
    )
