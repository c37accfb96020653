"""Hit rates of tiers: what counts as a hit, and that nobody beats the optimum."""

from __future__ import annotations

import random

import pytest

from vllm_pd.kv_offload.policies import POLICIES, Lru
from vllm_pd.sim.tier_hits import behind_gpu, distinct_blocks, replay, replay_optimal
from vllm_pd.sim.trace import TraceRequest, made_key, make_trace

SIZE = 16


def prompt(*numbers: int, extra: int = 1) -> TraceRequest:
    """A prompt of these blocks and `extra` tokens."""
    return TraceRequest(0.0, len(numbers) * SIZE + extra, 1, tuple(made_key(number) for number in numbers))


def test_only_leading_blocks_hit_and_what_the_gpu_has_is_not_asked_of_the_tier() -> None:
    trace = [prompt(0, 1, 2), prompt(5, 6, 7), prompt(0, 1, 2, 3), prompt(9, 1, 2)]
    run = behind_gpu(trace, 5, SIZE)
    # Four blocks of the first prompt; the second needs four and leaves one free, so the first keeps its beginning.
    assert [access.gpu for access in run.accesses] == [0, 0, 1, 0]
    hits = replay(run, Lru(100))
    assert (hits.blocks, hits.gpu, hits.cpu, hits.ssd) == (13, 1, 2, 0)
    assert hits.rate == 3 / 13


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    run = behind_gpu([prompt(0, 1, extra=0), prompt(0, 1, extra=0)], 8, SIZE)
    assert run.accesses[1].gpu == 1


def test_a_prompt_larger_than_the_gpu_is_left_out_and_counted() -> None:
    run = behind_gpu([prompt(*range(9)), prompt(1)], 4, SIZE)
    assert (run.refused, len(run.accesses), run.blocks) == (1, 1, 1)


def test_what_left_host_memory_comes_from_the_ssd_and_back_into_host_memory() -> None:
    trace = [prompt(0, 1), prompt(10, 11), prompt(20, 21), prompt(0, 1), prompt(30, 31), prompt(0, 1)]
    run = behind_gpu(trace, 3, SIZE)
    without = replay(run, Lru(4))
    below = replay(run, Lru(4), ssd_blocks=100)
    assert (without.cpu, without.ssd) == (2, 0)
    assert (below.cpu, below.ssd) == (2, 2)


def brute_force(run: object, capacity: int) -> int:
    """The most hits over every choice of what to keep after each request."""
    from itertools import combinations

    accesses = run.accesses  # type: ignore[attr-defined]
    states: dict[frozenset[bytes], int] = {frozenset(): 0}
    for access in accesses:
        after: dict[frozenset[bytes], int] = {}
        for kept, hits in states.items():
            for key in access.keys[access.gpu : access.usable]:
                if key not in kept:
                    break
                hits += 1
            known = sorted(kept.union(access.keys))
            for count in range(min(capacity, len(known)) + 1):
                for choice in combinations(known, count):
                    now = frozenset(choice)
                    after[now] = max(after.get(now, -1), hits)
        states = after
    return max(states.values())


def small_traffic(seed: int, requests: int) -> list[TraceRequest]:
    """Prompts over a small tree: beginnings are shared, and the same block follows different ones under other keys."""
    chance = random.Random(seed)
    made = []
    for _ in range(requests):
        path, numbers = 1, []
        for _ in range(chance.randint(1, 3)):
            path = path * 3 + chance.randint(0, 1)
            numbers.append(path)
        made.append(prompt(*numbers))
    return made


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_what_the_best_of_all_choices_has(seed: int) -> None:
    run = behind_gpu(small_traffic(seed, 7), 4, SIZE)
    for capacity in (1, 2, 3):
        assert replay_optimal(run, capacity).cpu == brute_force(run, capacity)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_optimum_and_all_that_fits_is_the_same_for_all(policy: str) -> None:
    trace = make_trace(sessions=15, turns=4, seed=3)
    run = behind_gpu(trace, 64, 512)
    for capacity in (8, 64, 256):
        assert replay(run, POLICIES[policy](capacity)).cpu <= replay_optimal(run, capacity).cpu
    everything = distinct_blocks(trace)
    assert replay(run, POLICIES[policy](everything)).cpu == replay_optimal(run, everything).cpu
