from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_pd.block_hash import KEY_BYTES, BlockKey
from vllm_pd.routing.model import Overlap
from vllm_pd.routing.prefix_index import PrefixIndex
from vllm_pd.state.base import WorkerId
from vllm_pd.state.block_index import Holder, Tier

GPU, CPU, SSD = int(Tier.GPU), int(Tier.CPU), int(Tier.SSD)


def key(n: int) -> BlockKey:
    return n.to_bytes(KEY_BYTES, "big")


def pack(numbers: Iterable[int]) -> bytes:
    return b"".join(map(key, numbers))


def holder(n: int, rank: int = 0) -> Holder:
    return Holder(WorkerId(f"host{n}:8000"), rank)


def index_of(*caches: dict[int, Iterable[int]]) -> PrefixIndex:
    index = PrefixIndex()
    for n, tiers in enumerate(caches):
        index.add(holder(n))
        index.apply(holder(n), {bits: pack(numbers) for bits, numbers in tiers.items()})
    return index


def naive_overlap(held: dict[int, int], keys: list[int]) -> Overlap:
    counts = {GPU: 0, CPU: 0, SSD: 0}
    for n in keys:
        bits = held.get(n, 0)
        if not bits:
            break
        counts[bits & -bits] += 1
    return Overlap(counts[GPU], counts[CPU], counts[SSD])


def test_counts_the_leading_run_of_each_cache() -> None:
    index = index_of({GPU: range(4)}, {GPU: [0, 1, 3]}, {GPU: [1, 2]})
    found = index.lookup([key(n) for n in range(6)])
    assert found == {holder(0): Overlap(gpu=4), holder(1): Overlap(gpu=2)}


def test_counts_a_block_on_its_fastest_tier() -> None:
    index = index_of({GPU | CPU: [0], CPU | SSD: [1], SSD: [2], GPU | SSD: [3]})
    assert index.lookup([key(n) for n in range(5)]) == {holder(0): Overlap(gpu=2, cpu=1, ssd=1)}


def test_a_prompt_without_whole_blocks_overlaps_with_nothing() -> None:
    assert index_of({GPU: [1]}).lookup([]) == {}


def test_ranks_of_one_worker_are_caches_of_their_own() -> None:
    index = PrefixIndex()
    for rank in (0, 1):
        index.add(holder(0, rank))
    index.apply(holder(0, 1), {GPU: pack([1])})
    assert index.lookup([key(1)]) == {holder(0, 1): Overlap(gpu=1)}


def test_an_unknown_cache_is_an_error() -> None:
    index = PrefixIndex()
    with pytest.raises(KeyError):
        index.apply(holder(0), {GPU: pack([1])})
    with pytest.raises(KeyError):
        index.clear(holder(0))
    index.remove(holder(0))


@pytest.mark.parametrize("blocks", [{8: pack([1])}, {-1: pack([1])}, {GPU: pack([1])[:-1]}])
def test_refuses_what_no_writer_of_this_version_sends(blocks: dict[int, bytes]) -> None:
    index = index_of({})
    with pytest.raises(ValueError, match=r"tier|multiple"):
        index.apply(holder(0), blocks)


def test_a_cache_that_was_removed_leaves_nothing_to_the_one_that_takes_its_place() -> None:
    index = index_of({GPU: range(10)}, {GPU: range(5)})
    index.remove(holder(0))
    index.add(holder(2))
    assert index.lookup([key(0)]) == {holder(1): Overlap(gpu=1)}
    assert len(index) == 5
    assert list(index.holders()) == [holder(1), holder(2)]


def test_adding_a_known_cache_again_keeps_its_blocks() -> None:
    index = index_of({GPU: [1]})
    index.add(holder(0))
    assert index.blocks(holder(0)) == 1


def test_two_hundred_caches() -> None:
    index = index_of(*({(GPU, CPU, SSD)[n % 3]: range(n + 1)} for n in range(200)))
    found = index.lookup([key(n) for n in range(300)])
    assert {h: o.blocks for h, o in found.items()} == {holder(n): n + 1 for n in range(200)}
    for n in range(0, 200, 2):
        index.remove(holder(n))
    assert len(index.lookup([key(0)])) == 100
    assert len(index) == 200


def test_many_caches_that_stop_together_and_change_between_lookups() -> None:
    index = index_of(*({GPU if n % 2 else CPU: range(100)} for n in range(40)))
    keys = [key(n) for n in range(200)]
    expected = {holder(n): Overlap(gpu=100) if n % 2 else Overlap(cpu=100) for n in range(40)}
    assert index.lookup(keys) == expected == index.lookup(keys)
    index.remove(holder(7))
    del expected[holder(7)]
    assert index.lookup(keys) == expected
    index.add(holder(50))
    index.apply(holder(50), {GPU: pack(range(100))})
    assert index.lookup(keys) == expected | {holder(50): Overlap(gpu=100)}
    index.apply(holder(50), {GPU: pack(range(100, 200))})
    assert index.lookup(keys) == expected | {holder(50): Overlap(gpu=200)}


BLOCKS = st.lists(st.integers(0, 30), max_size=40)


class SameAsNaive(RuleBasedStateMachine):
    """The index against a dictionary per cache."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.truth: dict[Holder, dict[int, int]] = {}

    @rule(n=st.integers(0, 5), rank=st.integers(0, 1))
    def add(self, n: int, rank: int) -> None:
        self.index.add(holder(n, rank))
        self.truth.setdefault(holder(n, rank), {})

    @precondition(lambda self: self.truth)
    @rule(data=st.data(), bits=st.integers(0, 7), numbers=BLOCKS)
    def apply(self, data: st.DataObject, bits: int, numbers: list[int]) -> None:
        which = data.draw(st.sampled_from(sorted(self.truth)))
        for _ in range(data.draw(st.integers(1, 2))):
            self.index.apply(which, {bits: pack(numbers)})
        for n in numbers:
            if bits:
                self.truth[which][n] = bits
            else:
                self.truth[which].pop(n, None)

    @precondition(lambda self: self.truth)
    @rule(data=st.data(), gone=st.booleans())
    def clear_or_remove(self, data: st.DataObject, gone: bool) -> None:
        which = data.draw(st.sampled_from(sorted(self.truth)))
        if gone:
            self.index.remove(which)
            del self.truth[which]
        else:
            self.index.clear(which)
            self.truth[which] = {}

    @rule(length=st.integers(0, 31), seed=st.integers(0, 3))
    def lookup(self, length: int, seed: int) -> None:
        numbers = list(range(length))
        if seed:
            random.Random(seed).shuffle(numbers)
        expected = {h: naive_overlap(held, numbers) for h, held in self.truth.items()}
        found = self.index.lookup([key(n) for n in numbers])
        assert found == {h: overlap for h, overlap in expected.items() if overlap.blocks}

    @invariant()
    def holds_the_same(self) -> None:
        assert set(self.index.holders()) == set(self.truth)
        assert len(self.index) == len({n for held in self.truth.values() for n in held})
        for which, held in self.truth.items():
            assert self.index.held(which) == {key(n): bits for n, bits in held.items()}
            assert self.index.blocks(which) == len(held)
            for tier, count in self.index.count(which).items():
                assert count == sum(1 for bits in held.values() if bits & tier)


SameAsNaive.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestSameAsNaive = SameAsNaive.TestCase


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=20), min_size=1, max_size=70))
@settings(max_examples=60, deadline=None)
def test_any_pattern_of_tiers_along_a_prompt(patterns: list[list[int]]) -> None:
    index = PrefixIndex()
    expected = {}
    for n, pattern in enumerate(patterns):
        index.add(holder(n))
        for position, bits in enumerate(pattern):
            index.apply(holder(n), {bits: key(position)})
        overlap = naive_overlap(dict(enumerate(pattern)), list(range(20)))
        if overlap.blocks:
            expected[holder(n)] = overlap
    assert index.lookup([key(n) for n in range(20)]) == expected


def test_a_block_of_one_cache_takes_at_most_100_bytes() -> None:
    blocks, caches = 10_000, 16
    packed = [pack(range(n * blocks, (n + 1) * blocks)) for n in range(caches)]
    index = PrefixIndex()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n in range(caches):
            index.add(holder(n))
            index.apply(holder(n), {GPU: packed[n]})
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / (blocks * caches) <= 100


def test_churn_leaves_no_more_than_what_is_held() -> None:
    """Caches that share blocks in ever new combinations: keys, logs and masks stay bounded."""
    index = PrefixIndex()
    caches = [holder(n) for n in range(40)]
    held: dict[Holder, list[int]] = {which: [] for which in caches}
    for which in caches:
        index.add(which)
    chance = random.Random(1)
    sizes = []
    for step in range(10_000):
        which = chance.choice(caches)
        new = [(step + n) // 2 for n in range(0, 20, 2)]
        index.apply(which, {chance.choice((GPU, CPU)): pack(new)})
        held[which] += new
        if len(held[which]) > 200:
            index.apply(which, {0: pack(held[which][:100])})
            held[which] = [n for n in held[which][100:] if n not in set(held[which][:100])]
        if step % 500 == 499:
            sizes.append(len(index._interned))
    distinct = {n for blocks in held.values() for n in blocks}
    assert len(index) == len(distinct)
    assert max(sizes) <= 2 * (len(distinct) + 1024)
    assert all(len(cache.log) <= (2 * cache.blocks + 256) * KEY_BYTES for cache in index._caches.values())
    for which in caches:
        index.clear(which)
    assert len(index) == 0


def test_draining_a_cache_bit_by_bit_ends_as_clearing_it_does() -> None:
    index = index_of({GPU: range(10), CPU: range(10, 14)}, {GPU: range(5)})
    index.apply(holder(0), {0: pack([3]), GPU: pack([20])})
    index.apply(holder(0), {GPU: pack([3])})
    turns = 1
    while not index.drain(holder(0), 4):
        turns += 1
    assert turns == 4
    assert index.blocks(holder(0)) == 0
    assert len(index) == 5
    assert set(index.count(holder(0)).values()) == {0}
    assert index.lookup([key(0)]) == {holder(1): Overlap(gpu=1)}
