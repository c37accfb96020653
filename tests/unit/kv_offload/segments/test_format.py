"""What is written to segment files and read back."""

from __future__ import annotations

from array import array
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.kv_offload.segments.format import (
    ALIGN,
    Entries,
    FormatError,
    Identity,
    NothingWritten,
    SegmentHeader,
    batch_header_bytes,
    decode_batch,
    decode_batch_head,
    decode_footer,
    decode_header,
    decode_trailer,
    encode_batch,
    encode_footer,
    encode_header,
    footer_bytes,
)

IDENTITY = Identity(7, 0xFEDCBA9876543210)
HEADER = SegmentHeader(IDENTITY, bytes(range(32)), 12_345, 1 << 28, 1234.5, 2)

sums = st.integers(0, 2**64 - 1)
keys = st.lists(st.binary(min_size=1, max_size=255), min_size=1, max_size=60)


def entries(some_keys: list[bytes], seed: int) -> Entries:
    count = len(some_keys)
    offsets = array("I", ((seed + 3 * i) % 2**32 for i in range(count)))
    checksums = array("Q", ((seed * 0x9E3779B97F4A7C15 + i) % 2**64 for i in range(count)))
    return Entries(some_keys, offsets, checksums)


def test_a_header_comes_back_as_it_was() -> None:
    page = encode_header(HEADER)
    assert len(page) == ALIGN
    assert decode_header(page) == HEADER


@given(st.integers(0, 8 * 100 - 1))
def test_a_header_with_a_wrong_bit_is_refused(bit: int) -> None:
    page = bytearray(encode_header(HEADER))
    page[bit // 8] ^= 1 << bit % 8
    with suppress(FormatError):
        assert decode_header(page) == HEADER, "only the padding may be other than it was"


def test_a_header_of_another_version_is_refused_with_both_numbers() -> None:
    page = bytearray(encode_header(HEADER))
    with pytest.raises(FormatError, match="damaged"):
        decode_header(page[:8] + b"\x09" + page[9:])
    with pytest.raises(FormatError, match="does not begin"):
        decode_header(b"x" * ALIGN)
    with pytest.raises(NothingWritten):
        decode_header(bytes(ALIGN))


@given(keys, st.integers(0, 1000), st.integers(1, 50), st.integers(1, 3))
def test_a_batch_comes_back_as_it_was(some_keys: list[bytes], sequence: int, start: int, pages: int) -> None:
    wanted = entries(some_keys, sequence)
    raw = encode_batch(IDENTITY, sequence, some_keys, wanted.checksums)
    assert len(raw) == batch_header_bytes(len(some_keys), sum(map(len, some_keys)))
    head = decode_batch_head(raw[:ALIGN], IDENTITY, sequence)
    assert head is not None and head.header_bytes == len(raw)
    found = decode_batch(head, raw, start * ALIGN, pages * ALIGN)
    assert found is not None
    assert (found.keys, found.checksums) == (some_keys, wanted.checksums)
    first = start + len(raw) // ALIGN
    assert list(found.offsets) == [first + i * pages for i in range(len(some_keys))]


@given(keys, st.data())
def test_a_batch_with_a_wrong_bit_is_not_one(some_keys: list[bytes], data: st.DataObject) -> None:
    whole = entries(some_keys, 1)
    raw = bytearray(encode_batch(IDENTITY, 3, some_keys, whole.checksums))
    used = 44 + len(some_keys) * 9 + sum(map(len, some_keys))
    bit = data.draw(st.integers(0, 8 * used - 1))
    raw[bit // 8] ^= 1 << bit % 8
    head = decode_batch_head(raw[:ALIGN], IDENTITY, 3)
    assert head is None or head.header_bytes > len(raw) or decode_batch(head, raw, 0, ALIGN) is None


@pytest.mark.parametrize(
    ("identity", "sequence"),
    [(Identity(8, IDENTITY.nonce), 3), (Identity(7, 1), 3), (IDENTITY, 2), (IDENTITY, 4)],
    ids=["another segment", "an earlier file in the same place", "an earlier batch", "a later batch"],
)
def test_a_batch_of_something_else_is_not_one(identity: Identity, sequence: int) -> None:
    raw = encode_batch(identity, sequence, [b"k"], array("Q", [1]))
    assert decode_batch_head(raw, IDENTITY, 3) is None


@given(keys, st.integers(0, 2**40))
def test_a_footer_comes_back_as_it_was(some_keys: list[bytes], seed: int) -> None:
    wanted = entries(some_keys, seed)
    raw = encode_footer(IDENTITY, wanted)
    assert len(raw) == footer_bytes(len(some_keys), sum(map(len, some_keys)))
    assert decode_trailer(raw[-ALIGN:], IDENTITY) == len(raw)
    assert decode_footer(raw) == wanted


@given(keys, st.data())
def test_a_footer_with_a_wrong_bit_is_not_one(some_keys: list[bytes], data: st.DataObject) -> None:
    raw = bytearray(encode_footer(IDENTITY, entries(some_keys, 1)))
    trailer = [*range(len(raw) - ALIGN, len(raw) - ALIGN + 48)]
    byte = data.draw(st.sampled_from([*range(len(raw) - ALIGN), *trailer]))
    raw[byte] ^= 1 << data.draw(st.integers(0, 7))
    length = decode_trailer(raw[-ALIGN:], IDENTITY)
    assert length == 0 or decode_footer(raw) is None


def test_a_footer_of_an_earlier_file_in_the_same_place_is_not_one() -> None:
    raw = encode_footer(Identity(7, 1), entries([b"k"], 1))
    assert decode_trailer(raw[-ALIGN:], IDENTITY) == 0
