"""Reads what earlier runs left in segment files. Changes nothing.

A finished segment says all in its footer. One without a footer was being written when its process died: its batch
headers are read one after the other until one is missing. Blocks of such a file may be torn, although their header is
there: they are read and compared, so that nothing is promised that a load would not find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from vllm_pd.kv_offload.segments import checksum
from vllm_pd.kv_offload.segments.format import (
    ALIGN,
    BatchHead,
    Entries,
    FormatError,
    Identity,
    SegmentHeader,
    aligned,
    decode_batch,
    decode_batch_head,
    decode_footer,
    decode_header,
    decode_trailer,
)

_HEAD_BYTES = 16 * ALIGN
"""Read at once of a batch header: the whole of most."""

Read = Callable[[int, int], memoryview]
"""`length` bytes from `offset` of the file, both multiples of `ALIGN`; valid until the next call. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a segment file holds.

    Attributes:
        header: its first page.
        entries: its blocks, in the order they were written.
        sealed: it has its footer.
        end: where the blocks end, in bytes.
    """

    header: SegmentHeader
    entries: Entries
    sealed: bool
    end: int


def read_header(read: Read, size: int) -> SegmentHeader:
    """
    Raises:
        FormatError: this is not a segment that can be read here.
        OSError: it cannot be read.
    """
    if size < ALIGN:
        raise FormatError(f"has only {size} bytes")
    header = decode_header(read(0, ALIGN))
    if header.checksum != checksum.KIND:
        raise FormatError(f"has checksums of kind {header.checksum}, and this vllm-pd computes kind {checksum.KIND}")
    if not header.block_bytes:
        raise FormatError("has blocks of no size")
    return header


def read_segment(read: Read, size: int) -> Found:
    """Where its blocks are; they themselves are not read.

    Args:
        size: of the file.

    Raises:
        FormatError, OSError: as `read_header`.
    """
    header = read_header(read, size)
    entries = _footer(read, size, header.identity)
    if entries is not None:
        return Found(header, entries, True, _end(entries, header))
    entries, end = _walk(read, size, header)
    return Found(header, entries, False, end)


def intact(read: Read, found: Found, portion: int) -> Iterator[tuple[int, bool]]:
    """Numbers of the blocks in order, with whether their bytes are those that were stored.

    Args:
        portion: bytes to read at once; at least one block is.

    Raises:
        OSError: blocks cannot be read; those not yielded yet.
    """
    stride, entries = aligned(found.header.block_bytes), found.entries
    number = 0
    while number < len(entries.keys):
        last = number + 1
        while (
            last < len(entries.keys)
            and entries.offsets[last] == entries.offsets[last - 1] + stride // ALIGN
            and (last + 1 - number) * stride <= portion
        ):
            last += 1
        raw = read(entries.offsets[number] * ALIGN, (last - number) * stride)
        seeds = checksum.seeds(found.header.namespace, entries.keys[number:last])
        sums = checksum.sums(np.frombuffer(raw, np.uint8).ctypes.data, stride, seeds)
        yield from zip(range(number, last), (sums == np.array(entries.checksums[number:last])).tolist(), strict=True)
        number = last


def without_torn(read: Read, found: Found, portion: int) -> Found:
    """An unfinished segment without those of its blocks that are not intact: any may have missed the disk.

    Args:
        portion: as `intact`.

    Raises:
        OSError: the blocks cannot be read.
    """
    entries = found.entries
    good = [number for number, whole in intact(read, found, portion) if whole]
    if len(good) == len(entries.keys):
        return found
    kept = Entries.empty()
    for number in good:
        kept.keys.append(entries.keys[number])
        kept.offsets.append(entries.offsets[number])
        kept.checksums.append(entries.checksums[number])
    return Found(found.header, kept, found.sealed, found.end)


def _footer(read: Read, size: int, identity: Identity) -> Entries | None:
    if size % ALIGN or size < 3 * ALIGN:
        return None
    length = decode_trailer(read(size - ALIGN, ALIGN), identity)
    if not length or length > size - ALIGN:
        return None
    return decode_footer(read(size - length, length))


def _end(entries: Entries, header: SegmentHeader) -> int:
    if not entries.keys:
        return ALIGN
    return max(entries.offsets) * ALIGN + aligned(header.block_bytes)


def _walk(read: Read, size: int, header: SegmentHeader) -> tuple[Entries, int]:
    """Blocks of all batches up to the first that is missing or damaged, and where the last one ends."""
    stride = aligned(header.block_bytes)
    found, at, sequence = Entries.empty(), ALIGN, 0
    while at + ALIGN <= size:
        raw = read(at, min(_HEAD_BYTES, (size - at) // ALIGN * ALIGN))
        head = decode_batch_head(raw, header.identity, sequence)
        if head is None or (end := _batch_end(head, at, stride)) > size:
            break
        if head.header_bytes > len(raw):
            raw = read(at, head.header_bytes)
        entries = decode_batch(head, raw, at, stride)
        if entries is None:
            break
        found.extend(entries)
        at, sequence = end, sequence + 1
    return found, at


def _batch_end(head: BatchHead, start: int, stride: int) -> int:
    return start + head.header_bytes + head.count * stride
