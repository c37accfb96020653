"""What is loaded and what is computed, for beliefs of all kinds."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.kv_offload.cost_gate import (
    BAND,
    Beliefs,
    Decision,
    Prompt,
    Reason,
    Run,
    Tier,
    break_even_tokens,
    decide,
    told,
)
from vllm_pd.kv_offload.load_rates import LoadSpeed
from vllm_pd.kv_offload.prefill_rate import PrefillSpeed

BLOCK_TOKENS, BLOCK_BYTES = 32, 64 * 1024
PREFILL = PrefillSpeed(base_s=0.005, token_s=1e-4, pair_s=1e-9, sequence_s=1e-4)
"""3.2 ms a block."""
FAST, SLOW = LoadSpeed(1e-3, 5e9), LoadSpeed(5e-3, 5e6)
"""13 microseconds and 13 ms a block."""


def beliefs(**changes: object) -> Beliefs:
    known = Beliefs(prefill=PREFILL, cpu=FAST, ssd=FAST, block_bytes=BLOCK_BYTES, step_tokens=2048)
    return dataclasses.replace(known, **changes)  # type: ignore[arg-type]


def prompt(*runs: tuple[Tier, int], computed: int = 0, rest: int = 100) -> Prompt:
    blocks = sum(blocks for _, blocks in runs)
    return Prompt(
        computed // BLOCK_TOKENS * BLOCK_TOKENS + blocks * BLOCK_TOKENS + rest,
        computed,
        BLOCK_TOKENS,
        tuple(Run(tier, blocks) for tier, blocks in runs),
    )


def choices(decision: Decision) -> list[tuple[Tier, bool, Reason]]:
    return [(part.run.tier, part.load, part.reason) for part in decision.parts]


def test_a_load_that_is_faster_is_made() -> None:
    decision = decide(prompt((Tier.CPU, 40)), beliefs())
    assert choices(decision) == [(Tier.CPU, True, Reason.FASTER)]
    assert decision.blocks == 40 and decision.loads_all
    assert decision.chosen_s < decision.compute_all_s


def test_a_load_that_is_slower_is_not_made() -> None:
    decision = decide(prompt((Tier.SSD, 40)), beliefs(ssd=SLOW))
    assert choices(decision) == [(Tier.SSD, False, Reason.SLOWER)]
    assert decision.blocks == 0
    assert decision.chosen_s == decision.compute_all_s < decision.load_all_s


def test_the_cpu_part_is_loaded_where_the_ssd_part_behind_it_is_computed() -> None:
    decision = decide(prompt((Tier.CPU, 20), (Tier.SSD, 20)), beliefs(ssd=SLOW))
    assert choices(decision) == [(Tier.CPU, True, Reason.FASTER), (Tier.SSD, False, Reason.SLOWER)]
    assert decision.blocks == 20


def test_a_slow_stretch_is_loaded_for_the_sake_of_the_blocks_behind_it() -> None:
    """Computing two blocks would be faster, but what is behind them could not be loaded then."""
    assert decide(prompt((Tier.SSD, 2)), beliefs(ssd=SLOW)).blocks == 0
    assert decide(prompt((Tier.SSD, 2), (Tier.CPU, 60)), beliefs(ssd=SLOW)).loads_all


def test_a_short_prompt_is_computed_where_a_long_one_is_loaded() -> None:
    slow_start = beliefs(cpu=LoadSpeed(0.05, 5e9))
    assert decide(prompt((Tier.CPU, 3)), slow_start).blocks == 0
    assert decide(prompt((Tier.CPU, 60)), slow_start).loads_all


@pytest.mark.parametrize("queued", ["cpu_queued", "ssd_queued"])
def test_what_is_queued_counts(queued: str) -> None:
    wanted = prompt((Tier.SSD, 10))
    assert decide(wanted, beliefs()).loads_all
    assert decide(wanted, beliefs(**{queued: 1 << 30})).blocks == 0


def test_the_wait_for_an_idle_engine_counts_for_each_tier_passed() -> None:
    wanted = beliefs(handover_s=0.02)
    assert decide(prompt((Tier.CPU, 10)), wanted).loads_all
    assert decide(prompt((Tier.SSD, 10)), wanted).blocks == 0


@pytest.mark.parametrize("unknown", [{"prefill": None}, {"cpu": None}], ids=str)
def test_what_was_never_measured_is_loaded(unknown: dict[str, None]) -> None:
    decision = decide(prompt((Tier.CPU, 1)), beliefs(**unknown))
    assert choices(decision) == [(Tier.CPU, True, Reason.UNKNOWN)]


def test_an_ssd_that_was_never_measured_is_loaded_with_all_before_it() -> None:
    decision = decide(prompt((Tier.CPU, 1), (Tier.SSD, 1), (Tier.CPU, 1)), beliefs(cpu=LoadSpeed(0.0, 1e5), ssd=None))
    assert [part.load for part in decision.parts] == [True, True, False]
    assert decision.parts[1].reason is Reason.UNKNOWN


def test_a_probe_is_made_although_it_is_slower() -> None:
    decision = decide(prompt((Tier.SSD, 40)), beliefs(ssd=SLOW), refused={Tier.SSD}, probe={Tier.SSD})
    assert choices(decision) == [(Tier.SSD, True, Reason.PROBE)]


def test_blocks_that_come_anyway_cost_only_the_wait() -> None:
    waiting = beliefs(ssd=SLOW, ssd_queued=40 * BLOCK_BYTES)
    assert decide(prompt((Tier.COMING, 400)), waiting).loads_all
    assert decide(prompt((Tier.COMING, 4)), waiting).blocks == 0
    assert decide(prompt((Tier.SSD, 400)), waiting).blocks == 0


@pytest.mark.parametrize(("refused", "loads"), [((), True), ((Tier.CPU,), False)])
def test_what_was_done_lately_goes_on_as_long_as_it_is_nearly_as_good(refused: tuple[Tier, ...], loads: bool) -> None:
    wanted = prompt((Tier.CPU, 10))
    compute_s = PREFILL.added_s(320, 0, 2048)
    near = LoadSpeed(compute_s * (1 + BAND / 2) if loads else compute_s * (1 - BAND / 2), 1e15)
    assert bool(decide(wanted, beliefs(cpu=near), refused=refused).blocks) is loads


def test_nothing_on_the_tiers_is_no_decision() -> None:
    decision = decide(prompt(rest=500), beliefs())
    assert decision.parts == () and decision.blocks == 0 and decision.loads_all
    assert decision.chosen_s == pytest.approx(decision.compute_all_s)


def test_the_first_block_may_be_on_the_gpu_in_part() -> None:
    """A chunk of several blocks, of which the GPU has the first."""
    wanted = Prompt(tokens=1000, computed=32, block_tokens=128, runs=(Run(Tier.CPU, 3),))
    assert [wanted.end_of(blocks) for blocks in range(4)] == [32, 128, 256, 384]
    assert decide(wanted, beliefs()).blocks == 3


def test_a_decision_explains_itself() -> None:
    words = decide(prompt((Tier.CPU, 20), (Tier.SSD, 20)), beliefs(ssd=SLOW)).words
    assert "loads 20 blocks on cpu (faster), computes 20 blocks on ssd (slower)" in words
    assert "of 1380 tokens 0 are on the GPU" in words
    assert "loading all 279 ms" in words and "computing all 139 ms" in words


@pytest.mark.parametrize("load", [0, 7, 20, 25, 40])
def test_a_decision_of_somebody_else_is_told_in_the_same_form(load: int) -> None:
    decision = told(prompt((Tier.CPU, 20), (Tier.SSD, 20)), beliefs(), load, Reason.FASTER, Reason.LATE)
    assert decision.blocks == load
    assert sum(part.run.blocks for part in decision.parts) == 40
    assert {part.reason for part in decision.parts if not part.load} <= {Reason.LATE}
    assert decision.loads_all is (load == 40)


RUNS = st.lists(st.tuples(st.sampled_from(Tier), st.integers(1, 200)), max_size=5)
SPEEDS = st.builds(LoadSpeed, st.floats(0, 0.1), st.floats(1e5, 1e11))


@given(runs=RUNS, cpu=SPEEDS, ssd=SPEEDS, rest=st.integers(1, 5000), queued=st.integers(0, 1 << 32))
def test_no_cut_is_clearly_better_than_the_one_chosen(
    runs: list[tuple[Tier, int]], cpu: LoadSpeed, ssd: LoadSpeed, rest: int, queued: int
) -> None:
    known = beliefs(cpu=cpu, ssd=ssd, ssd_queued=queued)
    wanted = prompt(*runs, rest=rest)
    decision = decide(wanted, known)
    loaded = [part.load for part in decision.parts]
    assert loaded == sorted(loaded, reverse=True), "only leading blocks can be loaded"
    for stop in range(sum(run.blocks for run in wanted.runs) + 1):
        other = told(wanted, known, stop, Reason.FASTER, Reason.SLOWER)
        assert decision.chosen_s <= other.chosen_s * (1 + BAND) / (1 - BAND) + PREFILL.base_s * 3


def test_break_even_is_where_the_decision_turns() -> None:
    known = beliefs(cpu=LoadSpeed(0.05, 1e9), ssd=LoadSpeed(0.2, 1e8))
    for tier in (Tier.CPU, Tier.SSD):
        tokens = break_even_tokens(tier, known, BLOCK_TOKENS)
        assert tokens is not None and tokens > 2 * BLOCK_TOKENS
        blocks = tokens // BLOCK_TOKENS
        assert decide(prompt((tier, 2 * blocks)), known, refused={tier}).loads_all
        assert decide(prompt((tier, blocks // 2)), known).blocks == 0
    ssd, cpu = (break_even_tokens(tier, known, BLOCK_TOKENS) for tier in (Tier.SSD, Tier.CPU))
    assert ssd is not None and cpu is not None and ssd > cpu


def test_a_tier_that_is_not_measured_has_no_break_even_and_one_that_never_wins_neither() -> None:
    assert break_even_tokens(Tier.SSD, beliefs(ssd=None), BLOCK_TOKENS) is None
    assert break_even_tokens(Tier.CPU, beliefs(prefill=None), BLOCK_TOKENS) is None
    never = dataclasses.replace(PREFILL, pair_s=0.0)
    assert break_even_tokens(Tier.CPU, beliefs(prefill=never, cpu=LoadSpeed(0.0, 1e3)), BLOCK_TOKENS) is None
