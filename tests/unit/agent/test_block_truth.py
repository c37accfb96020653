"""What is held, learned from events: tiers, copies, groups and resets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.agent.block_truth import BlockTruth, Changes
from vllm_pd.agent.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.state.block_index import Tier


def block(n: int) -> bytes:
    return n.to_bytes(KEY_BYTES, "big") + b"\xff" * (32 - KEY_BYTES)


def key(n: int) -> bytes:
    return block(n)[:KEY_BYTES]


def stored(*blocks: int, medium: str | None = "GPU", group: int = 0, kind: str | None = None) -> BlockStored:
    return BlockStored([block(n) for n in blocks], medium, group, kind)


def removed(*blocks: int, medium: str | None = "GPU", group: int = 0) -> BlockRemoved:
    return BlockRemoved([block(n) for n in blocks], medium, group)


def held(truth: BlockTruth) -> dict[int, int]:
    """Number of a block -> tier bits."""
    return {
        int.from_bytes(packed[at : at + KEY_BYTES], "big"): bits
        for bits, packed in truth.held().items()
        for at in range(0, len(packed), KEY_BYTES)
    }


def bits(changes: Changes) -> dict[int, int]:
    return {int.from_bytes(k, "big"): v for k, v in changes.blocks.items()}


def test_a_block_gets_and_loses_its_tiers() -> None:
    truth = BlockTruth()
    assert bits(truth.apply([stored(1, 2)])) == {1: 1, 2: 1}
    assert bits(truth.apply([stored(1, medium="CPU"), stored(1, medium="STORAGE")])) == {1: 7}
    assert bits(truth.apply([removed(1), removed(2)])) == {1: 6, 2: 0}
    assert held(truth) == {1: 6}
    assert [truth.count(tier) for tier in (Tier.GPU, Tier.CPU, Tier.SSD)] == [0, 1, 1]
    assert bits(truth.apply([removed(1, medium="CPU"), removed(1, medium="STORAGE")])) == {1: 0}
    assert held(truth) == {} and len(truth) == 0


def test_what_is_stored_and_removed_in_one_batch_is_no_change() -> None:
    truth = BlockTruth()
    truth.apply([stored(1)])
    assert truth.apply([stored(2), removed(2), removed(1), stored(1)]) == Changes({})


def test_a_block_with_two_copies_is_gone_after_the_second() -> None:
    truth = BlockTruth()
    truth.apply([stored(1), stored(1)])
    assert bits(truth.apply([removed(1)])) == {}
    assert bits(truth.apply([removed(1)])) == {1: 0}
    assert bits(truth.apply([stored(1)])) == {1: 1}
    assert bits(truth.apply([removed(1)])) == {1: 0}


def test_a_file_written_twice_is_one_file() -> None:
    truth = BlockTruth()
    truth.apply([stored(1, medium="STORAGE"), stored(1, medium="STORAGE")])
    assert bits(truth.apply([removed(1, medium="STORAGE")])) == {1: 0}


def test_a_removal_of_an_unknown_block_is_no_change() -> None:
    truth = BlockTruth()
    assert truth.apply([removed(1), removed(1, medium="CPU"), removed(2, group=3)]) == Changes({})


def test_a_reset_of_the_prefix_cache_leaves_the_tiers_below() -> None:
    truth = BlockTruth()
    truth.apply([stored(1, 2), stored(1), stored(2, 3, 4, 5, medium="CPU")])
    changes = truth.apply([AllBlocksCleared(), stored(6)])
    assert bits(changes) == {1: 0, 2: 2, 6: 1} and not changes.everything
    assert held(truth) == {2: 2, 3: 2, 4: 2, 5: 2, 6: 1}
    # The second copy went with the first.
    truth.apply([stored(1)])
    assert bits(truth.apply([removed(1)])) == {1: 0}


def test_a_reset_that_leaves_little_announces_what_is_left() -> None:
    truth = BlockTruth()
    truth.apply([stored(*range(10)), stored(1, medium="CPU")])
    assert truth.apply([AllBlocksCleared()]) == Changes({}, True)
    assert held(truth) == {1: 2}
    assert truth.apply([AllBlocksCleared()]) == Changes({})


def test_a_removal_without_hashes_empties_its_tier() -> None:
    truth = BlockTruth()
    truth.apply([stored(1, 2), stored(2, 3, medium="CPU"), stored(3, medium="STORAGE")])
    truth.apply([BlockRemoved([], "CPU")])
    assert held(truth) == {1: 1, 2: 1, 3: 4}


def test_after_forgetting_only_what_follows_is_claimed() -> None:
    truth = BlockTruth()
    truth.apply([stored(1, 1, 2)])
    assert truth.forget() == Changes({}, True)
    assert held(truth) == {} and truth.count(Tier.GPU) == 0
    assert bits(truth.apply([removed(1), stored(3)])) == {3: 1}


def test_a_block_of_two_full_groups_counts_when_both_hold_it() -> None:
    truth = BlockTruth()
    truth.apply([stored(1, 2, kind="full_attention"), stored(1, group=1, kind="mla_attention")])
    assert held(truth) == {1: 1}
    assert bits(truth.apply([stored(2, group=1, kind="mla_attention")])) == {2: 1}
    assert bits(truth.apply([removed(1, group=1)])) == {1: 0}
    assert truth.count(Tier.GPU) == 1


@pytest.mark.parametrize("kind", ["sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba"])
def test_a_windowed_group_does_not_decide_beside_a_full_one(kind: str) -> None:
    truth = BlockTruth()
    truth.apply([stored(2, group=1, kind=kind), stored(1, 2, kind="full_attention")])
    assert held(truth) == {1: 1, 2: 1}
    assert bits(truth.apply([removed(2, group=1), stored(3, group=1, kind=kind)])) == {}
    assert bits(truth.apply([removed(2)])) == {2: 0}


def test_windowed_groups_alone_must_all_hold_a_block() -> None:
    truth = BlockTruth()
    truth.apply([stored(1, 2, kind="mamba"), stored(2, group=1, kind="sliding_window")])
    assert held(truth) == {2: 1}


def test_a_group_whose_kind_becomes_known_late_changes_what_counts() -> None:
    truth = BlockTruth()
    truth.apply([stored(1, medium="CPU"), stored(2, medium="CPU", group=1)])
    assert held(truth) == {}
    changes = truth.apply([stored(1, kind="full_attention"), stored(7, group=1, kind="mamba")])
    assert changes.everything
    assert held(truth) == {1: 3}
    assert (truth.count(Tier.GPU), truth.count(Tier.CPU)) == (1, 1)


def test_a_second_full_group_that_shows_up_takes_back_what_it_does_not_hold() -> None:
    truth = BlockTruth()
    truth.apply([stored(1, kind="full_attention")])
    assert truth.apply([stored(2, group=1, kind="full_attention")]).everything
    assert held(truth) == {}


def test_caches_that_are_not_shared_are_left_out() -> None:
    truth = BlockTruth()
    truth.apply([stored(1, kind="cross_attention"), stored(2, group=1, kind="encoder_only_attention")])
    assert held(truth) == {}


@pytest.mark.parametrize("hashes", [[12345], [block(1), 7], [b"short"], [block(1), b""]])
def test_hashes_that_are_no_keys_are_counted_and_left_out(hashes: list[Any]) -> None:
    truth = BlockTruth()
    truth.apply([BlockStored(hashes, "GPU", 0), stored(2), BlockStored([block(3)], "TAPE")])
    assert held(truth) == {2: 1} and truth.ignored == 2


class Model:
    """The same rules for one full and one windowed group, written without any regard to cost."""

    def __init__(self) -> None:
        self.copies: dict[tuple[str, int, int], int] = {}

    def apply(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            self.drop("GPU")
            return
        medium, group = event.medium or "GPU", event.group_idx or 0
        if not event.block_hashes:
            self.drop(medium)
        for block_hash in event.block_hashes:
            assert isinstance(block_hash, bytes)
            at = (medium, group, int.from_bytes(block_hash[:KEY_BYTES], "big"))
            if isinstance(event, BlockRemoved):
                self.copies[at] = max(0, self.copies.get(at, 0) - 1)
            else:
                self.copies[at] = 1 if medium == "STORAGE" else self.copies.get(at, 0) + 1

    def drop(self, medium: str) -> None:
        self.copies = {at: n for at, n in self.copies.items() if at[0] != medium}

    def held(self) -> dict[int, int]:
        result: dict[int, int] = {}
        for (medium, group, n), copies in self.copies.items():
            if copies and group == 0:
                result[n] = result.get(n, 0) | {"GPU": 1, "CPU": 2, "STORAGE": 4}[medium]
        return result


def kind_of(group: int) -> str:
    return "mamba" if group else "full_attention"


numbers = st.lists(st.integers(0, 12), min_size=1, max_size=5)
media = st.sampled_from(["GPU", "GPU", "CPU", "STORAGE"])
groups = st.sampled_from([0, 0, 0, 1])
events = st.one_of(
    st.builds(lambda n, m, g: stored(*n, medium=m, group=g, kind=kind_of(g)), numbers, media, groups),
    st.builds(lambda n, m, g: removed(*n, medium=m, group=g), numbers, media, groups),
    st.sampled_from([AllBlocksCleared(), BlockRemoved([], "CPU")]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(events, max_size=6), max_size=12))
def test_any_events_lead_to_what_is_held_and_the_changes_lead_there_too(batches: list[list[Event]]) -> None:
    truth, model = BlockTruth(), Model()
    told: dict[int, int] = {}
    # From the start it is known which groups there are.
    known: list[Event] = [stored(99, group=0, kind=kind_of(0)), removed(99)]
    for batch in [known, *batches]:
        changes = truth.apply(batch)
        for event in batch:
            model.apply(event)
        told = held(truth) if changes.everything else merged(told, bits(changes))
        assert held(truth) == model.held() == told
        assert truth.count(Tier.GPU) == sum(bool(b & 1) for b in told.values())
        assert truth.count(Tier.CPU) == sum(bool(b & 2) for b in told.values())


def merged(told: Mapping[int, int], changed: Mapping[int, int]) -> dict[int, int]:
    return {n: b for n, b in {**told, **changed}.items() if b}
