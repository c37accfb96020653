"""What is in a segment file. Pure: bytes in, bytes out.

    offset 0        segment header, one page: what this file is
    4096            batch: header of whole pages (keys, checksums), then the blocks, each padded to whole pages
    ...             more batches, numbered from 0
    at the end      footer: keys, offsets and checksums of all blocks, then a page that says where the footer begins

Batches are appended; the footer is written once, after which the file ends with it. A file without a footer was being
written when its process died: its batch headers are walked from the start. Every structure carries a CRC and the
segment's random `nonce`, so that nothing which an earlier file left in the same disk blocks can pass for a part of this
one. The block's own checksum is compared at each load; the structures here only say where blocks are.

All numbers are little-endian.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGN = 4096
"""Everything begins at a multiple of it: what O_DIRECT wants."""

VERSION = 1
NAMESPACE_BYTES = 32
MAX_KEY_BYTES = 255

Bytes = bytes | bytearray | memoryview

_HEADER = struct.Struct("<8sIIQQ32sQQd")  # magic, version, checksum, id, nonce, namespace, block, size, created
_BATCH = struct.Struct("<8sQQIIII")  # magic, segment id, nonce, sequence, count, header bytes, key bytes
_TRAILER = struct.Struct("<8sQQIIQI")  # magic, segment id, nonce, count, key bytes, footer bytes, body's CRC
_CRC = struct.Struct("<I")
_HEADER_MAGIC = b"VPDKVSEG"
_BATCH_MAGIC = b"VPDKVBAT"
_TRAILER_MAGIC = b"VPDKVEND"
_SUM_BYTES = 8
_OFFSET_BYTES = 4

if array("I").itemsize != _OFFSET_BYTES or array("Q").itemsize != _SUM_BYTES:
    raise ImportError("segment files need a C compiler with 32-bit int and 64-bit long long")


class FormatError(ValueError):
    """These bytes are not what they should be; the message goes on after "it"."""


class NothingWritten(FormatError):
    """A file that was made and never written to: its process died in between."""


class Identity(NamedTuple):
    """What ties the parts of one segment file together."""

    segment_id: int
    nonce: int


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first page of a segment.

    Attributes:
        identity: of the file; the id is also in its name and grows with each new segment of a namespace.
        namespace: digest of everything that changes the bytes of a block.
        block_bytes: size of each block, without padding.
        segment_bytes: size the file had when it was made.
        created: seconds since 1970; for people.
        checksum: which one is stored for blocks (`checksum.KIND`).
    """

    identity: Identity
    namespace: bytes
    block_bytes: int
    segment_bytes: int
    created: float
    checksum: int


@dataclass(frozen=True, slots=True)
class Entries:
    """Blocks of a segment or batch, column by column.

    Attributes:
        keys: one for each block.
        offsets: in the file, in units of `ALIGN`.
        checksums: of the padded blocks.
    """

    keys: list[bytes]
    offsets: array[int]
    checksums: array[int]

    @classmethod
    def empty(cls) -> Entries:
        return cls([], array("I"), array("Q"))

    def extend(self, other: Entries) -> None:
        self.keys.extend(other.keys)
        self.offsets.extend(other.offsets)
        self.checksums.extend(other.checksums)


@dataclass(frozen=True, slots=True)
class BatchHead:
    """The fixed part of a batch header; `header_bytes` says how much to read for the rest."""

    sequence: int
    count: int
    header_bytes: int
    key_bytes: int


def aligned(size: int) -> int:
    """The smallest multiple of `ALIGN` that is not below `size`."""
    return -(-size // ALIGN) * ALIGN


def smallest_segment(block_bytes: int) -> int:
    """Bytes of a segment for a single block with the longest key."""
    return ALIGN + batch_header_bytes(1, MAX_KEY_BYTES) + aligned(block_bytes) + footer_bytes(1, MAX_KEY_BYTES)


def batch_header_bytes(count: int, key_bytes: int) -> int:
    """Size of the header of a batch of `count` blocks whose keys have `key_bytes` in all."""
    return aligned(_BATCH.size + _CRC.size + count * (1 + _SUM_BYTES) + key_bytes)


def footer_bytes(count: int, key_bytes: int) -> int:
    """Size of the footer, its last page included."""
    return aligned(count * (1 + _OFFSET_BYTES + _SUM_BYTES) + key_bytes) + ALIGN


def encode_header(header: SegmentHeader) -> bytes:
    """One page."""
    fixed = _HEADER.pack(
        _HEADER_MAGIC,
        VERSION,
        header.checksum,
        *header.identity,
        header.namespace,
        header.block_bytes,
        header.segment_bytes,
        header.created,
    )
    return _page(fixed)


def decode_header(page: Bytes) -> SegmentHeader:
    """
    Raises:
        FormatError: not a segment header that this version can read.
    """
    magic, version, checksum, segment_id, nonce, namespace, block, size, created = _HEADER.unpack_from(page)
    if not any(page[: _HEADER.size]):
        raise NothingWritten("is empty")
    if magic != _HEADER_MAGIC:
        raise FormatError("does not begin with a segment header")
    if _CRC.unpack_from(page, _HEADER.size)[0] != zlib.crc32(page[: _HEADER.size]):
        raise FormatError("has a damaged header")
    if version != VERSION:
        raise FormatError(f"has format version {version}, and this vllm-pd reads version {VERSION}")
    return SegmentHeader(Identity(segment_id, nonce), namespace, block, size, created, checksum)


def encode_batch(identity: Identity, sequence: int, keys: Sequence[bytes], checksums: array[int]) -> bytes:
    """The header of a batch; the blocks follow it in the same order."""
    key_bytes = sum(map(len, keys))
    header = batch_header_bytes(len(keys), key_bytes)
    fixed = _BATCH.pack(_BATCH_MAGIC, *identity, sequence, len(keys), header, key_bytes)
    body = b"".join((bytes(map(len, keys)), _little(checksums).tobytes(), *keys))
    crc = zlib.crc32(body, zlib.crc32(fixed))
    return (fixed + _CRC.pack(crc) + body).ljust(header, b"\0")


def decode_batch_head(page: Bytes, identity: Identity, sequence: int) -> BatchHead | None:
    """From the first page of a batch header; None if this is not batch `sequence` of this segment.

    Its numbers are plausible, not yet proven: that is `decode_batch`.
    """
    magic, segment_id, nonce, found, count, header, key_bytes = _BATCH.unpack_from(page)
    if magic != _BATCH_MAGIC or (segment_id, nonce) != identity or found != sequence or not count:
        return None
    if header != batch_header_bytes(count, key_bytes):
        return None
    return BatchHead(found, count, header, key_bytes)


def decode_batch(head: BatchHead, header: Bytes, start: int, stride: int) -> Entries | None:
    """Blocks of the batch, or None where the header is damaged.

    Args:
        header: its `head.header_bytes`.
        start: where in the file the header begins.
        stride: padded size of a block.
    """
    sums = _BATCH.size + _CRC.size + head.count
    end = sums + head.count * _SUM_BYTES + head.key_bytes
    crc = zlib.crc32(header[_BATCH.size + _CRC.size : end], zlib.crc32(header[: _BATCH.size]))
    if crc != _CRC.unpack_from(header, _BATCH.size)[0]:
        return None
    checksums = _array("Q", header[sums : sums + head.count * _SUM_BYTES])
    keys = _split(header[sums - head.count : sums], header[sums + head.count * _SUM_BYTES : end])
    if keys is None:
        return None
    first = (start + head.header_bytes) // ALIGN
    step = stride // ALIGN
    return Entries(keys, array("I", range(first, first + head.count * step, step)), checksums)


def encode_footer(identity: Identity, entries: Entries) -> bytes:
    """All that is known of a finished segment. The file must end with it."""
    key_bytes = sum(map(len, entries.keys))
    size = footer_bytes(len(entries.keys), key_bytes)
    lengths = bytes(map(len, entries.keys))
    columns = (_little(entries.checksums).tobytes(), _little(entries.offsets).tobytes(), lengths, *entries.keys)
    body = b"".join(columns).ljust(size - ALIGN, b"\0")
    trailer = _TRAILER.pack(_TRAILER_MAGIC, *identity, len(entries.keys), key_bytes, size, zlib.crc32(body))
    return body + _page(trailer)


def decode_trailer(page: Bytes, identity: Identity) -> int:
    """Size of the footer that ends with this page; 0 if it is not the end of this segment."""
    magic, segment_id, nonce, count, key_bytes, size, _ = _TRAILER.unpack_from(page)
    if magic != _TRAILER_MAGIC or (segment_id, nonce) != identity:
        return 0
    if _CRC.unpack_from(page, _TRAILER.size)[0] != zlib.crc32(page[: _TRAILER.size]):
        return 0
    return int(size) if size == footer_bytes(count, key_bytes) else 0


def decode_footer(footer: Bytes) -> Entries | None:
    """From all bytes of a footer whose last page `decode_trailer` has approved; None if its body is damaged."""
    _, _, _, count, key_bytes, _, crc = _TRAILER.unpack_from(footer, len(footer) - ALIGN)
    body = footer[: len(footer) - ALIGN]
    if zlib.crc32(body) != crc:
        return None
    offsets = count * _SUM_BYTES
    lengths = offsets + count * _OFFSET_BYTES
    keys = _split(body[lengths : lengths + count], body[lengths + count : lengths + count + key_bytes])
    if keys is None:
        return None
    return Entries(keys, _array("I", body[offsets:lengths]), _array("Q", body[:offsets]))


def _page(fixed: bytes) -> bytes:
    return (fixed + _CRC.pack(zlib.crc32(fixed))).ljust(ALIGN, b"\0")


def _split(lengths: Bytes, joined: Bytes) -> list[bytes] | None:
    """Keys one after the other -> each; None if lengths and bytes do not agree."""
    if sum(lengths) != len(joined):
        return None
    whole = bytes(joined)
    if len(set(lengths)) == 1:
        # The usual case, and a start reads a million of them.
        size = lengths[0]
        return [whole[at : at + size] for at in range(0, len(whole), size)]
    keys, at = [], 0
    for size in lengths:
        keys.append(whole[at : at + size])
        at += size
    return keys


def _little(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers


def _array(typecode: str, raw: Bytes) -> array[int]:
    numbers = array(typecode)
    numbers.frombytes(raw)
    return _little(numbers)
