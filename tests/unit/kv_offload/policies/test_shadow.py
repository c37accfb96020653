"""A shadow does what the policy that it stands for would have done."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from vllm_pd.kv_offload.policies.adaptive import SHARES
from vllm_pd.kv_offload.policies.base import Key
from vllm_pd.kv_offload.policies.shadow import Shadow
from vllm_pd.kv_offload.policies.split_lru import SplitLru


def request(policy: SplitLru, sample: Sequence[tuple[bool, Key]]) -> int:
    """As `Shadow.request`, by what a tier calls of its policy."""
    chain = [key for _, key in sample]
    here = {key for key in chain if key in policy}
    hits = 0
    for needed, key in sample:
        if needed and key not in here:
            break
        hits += needed
    new = [key for key in chain if key not in here]
    excess = len(policy) + len(new) - policy.capacity
    if excess <= 0 or policy.evict(excess, chain) is not None:
        for key in new:
            policy.insert(key)
            policy.unpin(key)
    policy.accessed(chain, here)
    return hits


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", range(8))
def test_a_shadow_keeps_and_hits_what_the_policy_would(share: float, seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([1, 3, 8, 40])
    shadow, policy = Shadow(capacity, share), SplitLru(capacity, share)
    known: list[list[Key]] = [[]]
    hits = 0
    for number in range(400):
        chain = rng.choice(known)[: rng.randint(0, 12)]
        chain = [*chain, *(b"%d.%d" % (number, i) for i in range(rng.randint(0, 8)))]
        known = [*known[-12:], chain]
        first = rng.randint(0, len(chain))
        sample = [(i >= first, key) for i, key in enumerate(chain)]
        found = shadow.request(sample)
        assert found == request(policy, sample)
        hits += found
        assert {key for chain in known for key in chain if key in shadow} == {
            key for chain in known for key in chain if key in policy
        }
        assert len(shadow) == len(policy) <= capacity
    assert hits or capacity < 8


def test_a_cleared_shadow_is_as_a_new_one() -> None:
    sample = [(True, b"%d" % i) for i in range(6)]
    shadow = Shadow(4, 0.4)
    for _ in range(3):
        shadow.request(sample[:3])
        shadow.request(sample[3:])
    shadow.clear()
    assert len(shadow) == 0
    assert [shadow.request(sample[:3]) for _ in range(2)] == [0, 3]
