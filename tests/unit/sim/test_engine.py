"""The modelled engine schedules, caches and preempts as vLLM does."""

from __future__ import annotations

import random

import pytest

from vllm_pd.sim.engine import Engine
from vllm_pd.sim.timing import TimingModel
from vllm_pd.sim.trace import made_key
from vllm_pd.sim.work import EngineConfig, Outcome, Work
from vllm_pd.state.block_index import Tier

TIMING = TimingModel()
SIZE = 16


def engine(blocks: int = 64, **kwargs: int) -> Engine:
    return Engine(EngineConfig(gpu_blocks=blocks, block_size=SIZE, **kwargs), TIMING)


def keys(first: int, count: int) -> list[bytes]:
    return [made_key(i) for i in range(first, first + count)]


def work(tag: object, prompt: int, output: int = 1, first: int = 0, **kwargs: bool) -> Work:
    return Work(tag, prompt, output, keys(first, prompt // SIZE), **kwargs)


def run(engine: Engine, now: float = 0.0, longest: int = 1_000_000) -> tuple[float, list[tuple[float, Outcome]]]:
    """Until nothing is left to do; returns the time and every outcome with when it came."""
    outcomes = []
    while not engine.idle:
        step = engine.begin(now, longest)
        now = step.ends if step else engine.next_load or pytest.fail("stuck")
        outcomes.append((now, engine.end()))
    return now, outcomes


def held(outcomes: list[tuple[float, Outcome]]) -> dict[bytes, int]:
    bits: dict[bytes, int] = {}
    for _, outcome in outcomes:
        bits |= outcome.changed
    return {key: value for key, value in bits.items() if value}


def test_a_prompt_alone_takes_the_formula_and_each_token_a_decode_step() -> None:
    e = engine(1024)
    w = work("a", 1000, output=3)
    e.add(w)
    now, outcomes = run(e)
    first = next(at for at, outcome in outcomes if w in outcome.first_tokens)
    assert first == pytest.approx(TIMING.whole_prefill(1000))
    assert now - first == pytest.approx(2 * TIMING.decode(63 / 1024, 1))


def test_a_long_prompt_is_computed_in_chunks_for_the_same_time_apart_from_the_fixed_part() -> None:
    e = engine(1024, max_num_batched_tokens=512)
    e.add(work("a", 2048))
    now, outcomes = run(e)
    assert len(outcomes) == 4
    assert now == pytest.approx(TIMING.whole_prefill(2048) + 3 * TIMING.prefill_base)


def test_the_budget_is_shared_first_come_first_served_and_decodes_go_before_prompts() -> None:
    e = engine(1024, max_num_batched_tokens=100)
    e.add(work("decodes", 10, output=50, first=0))
    e.begin(0.0)
    e.end()
    first, second = work("first", 150, first=100), work("second", 60, first=200)
    e.add(first)
    e.add(second)
    step = e.begin(1.0)
    assert step is not None and step.prefilled == [(first, 99)] and step.decoding == 1
    e.end()
    step = e.begin(2.0)
    assert step is not None and step.prefilled == [(first, 51), (second, 48)]


def test_a_repeated_prompt_hits_whole_blocks_but_computes_its_last_token() -> None:
    e = engine()
    e.add(work("a", 4 * SIZE))
    run(e)
    again = work("b", 4 * SIZE)
    e.add(again)
    run(e)
    assert (again.gpu_hits, again.cached) == (3, 3 * SIZE)


def test_a_prompt_scheduled_in_the_same_step_already_hits() -> None:
    e = engine()
    one, two = work("a", 5 * SIZE), work("b", 5 * SIZE)
    e.add(one)
    e.add(two)
    run(e)
    assert (one.gpu_hits, two.gpu_hits) == (0, 4)


def test_the_least_recently_used_blocks_go_first_and_the_tail_before_the_head() -> None:
    e = engine(8)
    outcomes = []
    for first in (0, 100):
        e.add(work("x", 4 * SIZE, first=first))
        outcomes += run(e)[1]
    e.add(work("y", 2 * SIZE, first=200))
    outcomes += run(e)[1]
    assert held(outcomes).keys() == {*keys(0, 2), *keys(100, 4), *keys(200, 2)}


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    e = engine(4)
    e.add(work("x", 2 * SIZE + 5, first=0))
    outcomes = run(e)[1]
    e.add(work("y", 2 * SIZE, first=100))
    outcomes += run(e)[1]
    assert held(outcomes).keys() == {*keys(0, 2), *keys(100, 2)}


def test_when_blocks_run_out_the_last_admitted_gives_way_and_is_computed_again() -> None:
    e = engine(8)
    one, two = work("one", 3 * SIZE, output=60, first=0), work("two", 3 * SIZE, output=60, first=100)
    e.add(one)
    e.add(two)
    _, outcomes = run(e)
    order = [w.tag for _, outcome in outcomes for w in outcome.finished]
    assert order == ["one", "two"] and (one.preemptions, two.preemptions) == (0, 1)
    assert [w.tag for _, outcome in outcomes for w in outcome.first_tokens] == ["one", "two"]
    assert two.generated == 60 and e.pool.used == 0


def test_a_prompt_waits_until_the_cache_has_room_for_all_of_it() -> None:
    e = engine(8)
    e.add(work("one", 5 * SIZE, output=10, first=0))
    e.add(work("two", 5 * SIZE, first=100))
    e.begin(0.0)
    assert (e.running, e.waiting) == (1, 1)
    _, outcomes = run(e)
    assert [w.tag for _, outcome in outcomes for w in outcome.finished] == ["one", "two"]


def test_evicted_blocks_come_back_from_the_lower_tiers_after_their_load_time() -> None:
    e = engine(6, cpu_blocks=6, ssd_blocks=100)
    outcomes = []
    for first in (0, 100, 200):
        e.add(work(first, 4 * SIZE, first=first))
        outcomes += run(e)[1]
    bits = held(outcomes)
    assert bits[made_key(200)] == Tier.GPU | Tier.CPU | Tier.SSD
    assert bits[made_key(0)] == Tier.SSD
    again = work("again", 4 * SIZE + 1, first=100)
    e.add(again)
    now, outcomes = run(e, 10.0)
    assert (again.gpu_hits, again.cpu_hits, again.ssd_hits) == (2, 0, 2)
    load = 2 * SIZE * TIMING.ssd_token
    assert now == pytest.approx(10.0 + load + TIMING.prefill(1, 0, 0) + TIMING.decode(5 / 6, 1))


def test_a_remote_prompt_waits_for_its_transfer_and_computes_one_token() -> None:
    e = engine()
    w = work("a", 4 * SIZE, output=2, remote=True)
    e.add(w)
    assert e.begin(0.0) is None
    arrives = TIMING.transfer_base + (4 * SIZE - 1) * TIMING.transfer_token
    assert e.next_load == pytest.approx(arrives)
    _, outcomes = run(e, arrives)
    assert outcomes[0][1].fetched == [w] and outcomes[0][1].first_tokens == [w]
    assert outcomes[0][0] < arrives + TIMING.prefill_base


def test_held_blocks_stay_until_they_are_released() -> None:
    e = engine(8)
    w = work("a", 4 * SIZE, hold=True)
    e.add(w)
    run(e)
    assert e.pool.used == 4
    e.release(w)
    assert e.pool.used == 0


def test_requests_that_hold_loaded_blocks_do_not_wait_for_each_other_for_ever() -> None:
    e = engine(8, cpu_blocks=100)
    for first in (0, 100):
        e.add(work(first, 4 * SIZE, first=first))
        run(e)
    e.add(work("other", 8 * SIZE, first=300))
    run(e)
    for first in (0, 100):
        e.add(Work(first, 7 * SIZE, 1, keys(first, 4) + keys(first + 50, 3)))
    _, outcomes = run(e, 5.0)
    assert sorted(w.tag for _, o in outcomes for w in o.finished) == [0, 100]  # type: ignore[type-var]


def test_a_step_is_cut_after_the_iteration_in_progress() -> None:
    e = engine()
    w = work("a", SIZE, output=10)
    e.add(w)
    e.begin(0.0)
    e.end()
    step = e.begin(1.0)
    assert step is not None and step.iterations == 9
    assert e.add(work("b", SIZE, first=50))
    assert e.cut(1.0 + 2.5 * step.each) == pytest.approx(1.0 + 3 * step.each)
    e.end()
    assert e.generated(w) == 4


def test_an_aborted_request_leaves_nothing_behind() -> None:
    e = engine(cpu_blocks=10)
    running, waiting = work("a", 3 * SIZE, output=10), work("b", 2 * SIZE, first=50)
    e.add(running)
    e.begin(0.0)
    e.end()
    e.add(waiting)
    e.abort(running)
    e.abort(waiting)
    assert e.idle and e.pool.used == 0 and e.begin(1.0) is None


@pytest.mark.parametrize("seed", range(6))
def test_steps_taken_in_bulk_and_one_by_one_give_the_same_times(seed: int) -> None:
    def replay(longest: int) -> dict[object, tuple[float, int]]:
        chance = random.Random(seed)
        e = engine(40, cpu_blocks=60, ssd_blocks=80, max_num_batched_tokens=128, max_num_seqs=6)
        arrivals = sorted((chance.uniform(0, 3), i) for i in range(40))
        works = [
            work(i, chance.randrange(20, 300), output=chance.randrange(1, 60), first=chance.choice((0, 100, 200)))
            for i in range(40)
        ]
        now, ends = 0.0, dict[object, tuple[float, int]]()
        while arrivals or not e.idle:
            if e.idle:
                now = max(now, arrivals[0][0])
            while arrivals and arrivals[0][0] <= now + 1e-9:
                e.add(works[arrivals.pop(0)[1]])
            step = e.begin(now, longest)
            if step is None:
                times = [t for t in (e.next_load, arrivals[0][0] if arrivals else None) if t is not None]
                now = min(times)
            else:
                ends_at = step.ends
                if arrivals and arrivals[0][0] < ends_at:
                    ends_at = e.cut(arrivals[0][0])
                now = ends_at
            for w in (outcome := e.end()).finished:
                ends[w.tag] = (round(now, 6), w.generated)
            assert e.pool.used + e.pool.free == e.pool.size
            del outcome
        assert e.pool.used == 0
        return ends

    assert replay(1) == replay(1_000_000)
