"""Entries, slabs and digests, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.block_index import EPOCH, HOLDER, digests, key, packed
from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.state import BlockChange, Digest, Position, StreamEntry
from vllm_pd.state.block_codec import (
    CHANGE_BLOCKS,
    SLAB_BYTES,
    SLOTS,
    blocks_of_slab,
    decode_digests,
    decode_entry,
    digest_of,
    encode_digests,
    encode_entry,
    order,
    pieces,
)

AT = Position("5-1")


def test_an_entry_comes_back_as_it_was() -> None:
    change = BlockChange(7, True, {0: packed([1]), 5: packed([2, 3])})
    assert decode_entry(AT, encode_entry(HOLDER, EPOCH, change)) == StreamEntry(AT, HOLDER, EPOCH, change)


def test_an_entry_of_a_newer_version_with_more_fields_is_read() -> None:
    data = msgspec.msgpack.encode(["a:1", 0, 5, 1, False, {1: key(1)}, "news"])
    assert decode_entry(AT, data).change.blocks == {1: key(1)}


@pytest.mark.parametrize(
    "fields",
    [
        ["a:1", 0, 5, 1, False, {8: key(1)}],
        ["a:1", 0, 5, 1, False, {-1: key(1)}],
        ["a:1", 0, 5, 1, False, {1: key(1)[1:]}],
        ["a:1", 0, 5, 0, False, {}],
        ["a:1", -1, 5, 1, False, {}],
        ["a:1", 0, 5, 1, False],
        ["a:1", 0, "5", 1, False, {}],
        {"worker": "a:1"},
    ],
)
def test_what_is_no_entry_is_refused(fields: object) -> None:
    with pytest.raises(ValueError):
        decode_entry(AT, msgspec.msgpack.encode(fields))


@given(st.dictionaries(st.integers(0, 7), st.integers(0, 3 * CHANGE_BLOCKS), max_size=4))
def test_pieces_add_up_in_order(counts: dict[int, int]) -> None:
    changed = {bits: bytes(15 * count) for bits, count in counts.items()}
    parts = list(pieces(changed))
    assert all(0 < sum(map(len, part.values())) <= CHANGE_BLOCKS * KEY_BYTES for part in parts)
    assert all(data for part in parts for data in part.values())
    together: dict[int, bytes] = {}
    for part in parts:
        for bits, data in part.items():
            together[bits] = together.get(bits, b"") + data
    assert list(together.items()) == [(bits, data) for bits, data in changed.items() if data]
    assert len(parts) == -(-sum(counts.values()) // CHANGE_BLOCKS)


@given(st.sets(st.integers(0, 10_000), max_size=70))
def test_a_digest_is_the_xor_of_its_keys(numbers: set[int]) -> None:
    expected = digests(dict.fromkeys(map(key, numbers), 1)).get(1, Digest(0, 0))
    assert digest_of(packed(numbers)) == expected
    assert decode_digests(encode_digests({1: expected})) == ({1: expected} if numbers else {})


@pytest.mark.parametrize("slab", [b"", bytes(SLAB_BYTES - 1), b"\x08" + bytes(SLAB_BYTES - 1)])
def test_what_is_no_slab_is_refused(slab: bytes) -> None:
    with pytest.raises(ValueError, match="slab"):
        blocks_of_slab(slab, {})


def test_blocks_of_a_slab_come_by_their_tiers() -> None:
    tiers = bytearray(SLOTS)
    tiers[0:2], tiers[5], tiers[SLOTS - 1] = b"\x01\x01", 6, 1
    keys = b"".join(map(key, range(SLOTS)))
    found: dict[int, list[bytes]] = {6: [b"before"]}
    blocks_of_slab(bytes(tiers) + keys, found)
    assert found == {1: [packed([0, 1]), key(SLOTS - 1)], 6: [b"before", key(5)]}


def test_positions_are_ordered_by_time_and_number() -> None:
    positions = [Position(name) for name in ("0-0", "9-2", "10-0", "10-11", "10-2")]
    assert sorted(positions, key=order) == ["0-0", "9-2", "10-0", "10-2", "10-11"]
