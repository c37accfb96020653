"""Each eviction policy: the suite that all must pass, and what makes it itself."""

from __future__ import annotations

import pytest

from tests.conformance.eviction_policy import EvictionPolicyConformance, Make, hold, keys
from vllm_pd.kv_offload.policies import POLICIES, Adaptive, Arc, Lru, S3Fifo, Sieve, WTinyLfu
from vllm_pd.kv_offload.policies.adaptive import FIRST_SHARE
from vllm_pd.kv_offload.policies.base import EvictionPolicy
from vllm_pd.kv_offload.policies.split_lru import LRU_SHARE, SplitLru
from vllm_pd.kv_offload.policies.wtinylfu import FrequencySketch
from vllm_pd.sim.trace import made_key as key


@pytest.mark.parametrize("name", [*POLICIES, "split"])
class TestConformance(EvictionPolicyConformance):
    @pytest.fixture
    def make(self, name: str) -> Make:
        return POLICIES[name] if name in POLICIES else lambda capacity: SplitLru(capacity, 0.3)


def request(policy: EvictionPolicy, *numbers: int) -> int:
    """A request for a prompt of these blocks, as the CPU tier sees it. Returns how many leading blocks hit."""
    chain = keys(*numbers)
    here = {name for name in chain if name in policy}
    new = [name for name in chain if name not in here]
    policy.missed(new)
    excess = len(policy) + len(new) - policy.capacity
    if excess <= 0 or policy.evict(excess, chain) is not None:
        for name in new:
            policy.insert(name)
            policy.unpin(name)
    policy.accessed(chain, here)
    return next((i for i, name in enumerate(chain) if name not in here), len(chain))


def test_lru_lets_the_longest_unused_go() -> None:
    policy = Lru(3)
    request(policy, 1)
    request(policy, 2)
    request(policy, 3)
    request(policy, 1)
    assert policy.evict(2) == keys(2, 3)


def test_blocks_put_back_after_use_keep_their_place_in_the_order() -> None:
    policy = Lru(4)
    hold(policy, 1, 2, 3, 4)
    policy.pin(key(1))
    policy.pin(key(2))
    assert policy.evict(1) == keys(3)
    policy.unpin(key(2))
    policy.unpin(key(1))
    assert policy.evict(3) == keys(1, 2, 4)


def hits_among_scans(policy: EvictionPolicy) -> int:
    """Of a prompt of ten blocks, after turns with three prompts that never come again and are larger than the tier."""
    request(policy, *range(10))
    for turn in range(12):
        request(policy, *range(10))
        for i in range(3):
            start = 1000 + turn * 200 + i * 40
            request(policy, *range(start, start + 40))
    return request(policy, *range(10))


@pytest.mark.parametrize("make", [Arc, S3Fifo, WTinyLfu, Adaptive])
def test_blocks_in_use_outlast_a_scan_of_blocks_used_once(make: Make) -> None:
    assert hits_among_scans(make(100)) == 10
    assert hits_among_scans(Lru(100)) == 0


def test_sieve_keeps_what_was_used_since_the_hand_passed() -> None:
    policy = Sieve(4)
    hold(policy, 1, 2, 3, 4)
    policy.accessed(keys(2), set(keys(2)))
    assert policy.evict(2) == keys(1, 3)
    assert policy.evict(2) == keys(4, 2)


def test_s3fifo_lets_a_block_that_came_back_begin_among_those_used_again() -> None:
    policy = S3Fifo(10)
    request(policy, *range(10))
    assert policy.evict(1) == keys(9)
    request(policy, 9)
    assert policy.evict(9) == keys(8, 7, 6, 5, 4, 3, 2, 1, 0)
    assert policy.evict(1) == keys(9)


def test_arc_shifts_room_to_the_side_whose_ghosts_are_asked_for() -> None:
    policy = Arc(4)
    request(policy, 1)
    request(policy, 1)
    for number in (2, 3, 4, 5):
        request(policy, number)
    assert key(2) not in policy and key(1) in policy
    for _ in range(4):
        request(policy, 2)
        policy.evict(1)
    assert key(1) in policy or policy._target > 0


def test_the_sketch_counts_up_to_fifteen_and_forgets_by_halves() -> None:
    sketch = FrequencySketch(16)
    for _ in range(40):
        sketch.add(key(1))
    sketch.add(key(2))
    assert sketch.count(key(1)) == 15 and sketch.count(key(2)) == 1 and sketch.count(key(3)) == 0
    for number in range(100, 220):
        sketch.add(key(number))
    assert sketch.count(key(1)) <= 8


def test_a_small_share_lets_new_blocks_pass_and_a_share_of_all_is_lru() -> None:
    small, lru = SplitLru(10, 0.1), SplitLru(10, LRU_SHARE)
    for policy in (small, lru):
        request(policy, 0, 1)
        request(policy, 0, 1)
        for number in range(10, 30):
            request(policy, number)
    assert key(0) in small and key(0) not in lru


def test_adaptive_begins_in_the_middle_and_moves_where_the_hits_are() -> None:
    """First a working set that fits and is used by turns; then scans between two uses of a prompt."""
    policy = Adaptive(100)
    assert policy.share == FIRST_SHARE
    for _ in range(20):
        for start in range(0, 90, 30):
            request(policy, *range(start, start + 30))
    assert request(policy, *range(30)) == 30
    number = 1000
    for _ in range(60):
        request(policy, *range(500, 520))
        for _ in range(3):
            request(policy, *range(number, number + 30))
            number += 30
    assert policy.share < LRU_SHARE
    assert request(policy, *range(500, 520)) == 20


def test_adaptive_samples_a_large_tier_and_follows_a_small_one_whole() -> None:
    assert Adaptive(100)._mask == 0
    large = Adaptive(100_000)
    assert large._mask == 31 and sum(shadow.capacity for shadow in large._shadows) < 100_000 / 4
