"""Where a writer puts blocks: slabs always hold exactly what was stated, in few stretches."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.block_index import digests, key, packed, unpacked, whatever
from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.state.block_codec import SLAB_BYTES, SLOTS, blocks_of_slab
from vllm_pd.state.block_slots import BlockSlots, SlabWrite


class Slabs:
    """What a store makes of the writes."""

    def __init__(self) -> None:
        self.slabs: dict[int, bytearray] = {}

    def take(self, writes: list[SlabWrite]) -> None:
        for write in writes:
            if write.new:
                assert write.slab not in self.slabs
                self.slabs[write.slab] = bytearray(SLAB_BYTES)
            for offset, data in write.stretches:
                assert offset + len(data) <= SLAB_BYTES
                self.slabs[write.slab][offset : offset + len(data)] = data

    def blocks(self) -> dict[bytes, int]:
        found: dict[int, list[bytes]] = {}
        for slab in self.slabs.values():
            blocks_of_slab(bytes(slab), found)
        held = {bits: b"".join(parts) for bits, parts in found.items()}
        blocks = unpacked(held)
        assert sum(map(len, held.values())) == KEY_BYTES * len(blocks), "a block is held twice"
        return blocks


@given(st.lists(st.sampled_from([5, 100, 3 * SLOTS]), max_size=8), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_slabs_hold_what_was_stated(sizes: list[int], seed: int) -> None:
    chance = random.Random(seed)
    slots, slabs, truth = BlockSlots(), Slabs(), dict[bytes, int]()
    for size in sizes:
        slots.apply(whatever(truth, chance, size))
        if chance.random() < 0.7:
            slabs.take(slots.take_writes())
            assert slabs.blocks() == truth
    slabs.take(slots.take_writes())
    assert slabs.blocks() == truth
    assert slots.digests() == digests(truth)
    assert len(slots) == len(truth)
    assert len(slabs.slabs) == slots.slabs
    assert slots.take_writes() == []


def test_blocks_that_come_together_are_written_together() -> None:
    slots = BlockSlots()
    slots.apply({1: packed(range(500))})
    (write,) = slots.take_writes()
    assert write.new
    assert len(write.stretches) == 2
    slots.apply({0: packed(range(100, 300)), 3: packed(range(100))})
    (write,) = slots.take_writes()
    assert [(offset, len(data)) for offset, data in write.stretches] == [(0, 300)]


def test_churn_needs_no_more_slabs_than_the_most_blocks_at_once() -> None:
    slots, chance = BlockSlots(), random.Random(1)
    held = list(range(10_000))
    slots.apply({1: packed(held)})
    before = slots.slabs
    assert before == 6
    fresh = 10_000
    for _ in range(30):
        gone = [held.pop(chance.randrange(len(held))) for _ in range(300)]
        new = list(range(fresh, fresh + 300))
        fresh += 300
        held += new
        slots.apply({0: packed(gone), 1: packed(new)})
    assert slots.slabs == before


def test_random_eviction_is_written_in_few_stretches() -> None:
    slots, chance = BlockSlots(), random.Random(1)
    slots.apply({1: packed(range(10_000))})
    slots.take_writes()
    slots.apply({0: packed(chance.sample(range(10_000), 1000))})
    slots.apply({1: packed(range(10_000, 11_000))})
    writes = slots.take_writes()
    assert sum(len(write.stretches) for write in writes) < 50
    assert sum(len(data) for write in writes for _, data in write.stretches) < 60_000


def test_keys_may_hold_any_byte() -> None:
    slots, slabs = BlockSlots(), Slabs()
    names = [bytes([n]) * KEY_BYTES for n in range(256)]
    slots.apply({7: b"".join(names), 2: key(1)})
    slabs.take(slots.take_writes())
    assert slabs.blocks() == {**dict.fromkeys(names, 7), key(1): 2}
