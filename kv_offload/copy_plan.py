"""From block lists to byte ranges: which bytes a transfer between the KV cache and the DRAM tier moves. Pure.

Words, as vLLM uses them: a *block* is a page of the KV cache (the "GPU side", which is DRAM as well on the CPU
platform); a *chunk* is one slot of the tier and holds `blocks_per_chunk` blocks. A transfer lists its blocks group by
group (one group per kind of layer in hybrid models). Inside a group the blocks follow one another in the request, so
only the first and the last chunk of a group can be partly covered; `block_indices` says where in the request, counted
in blocks, a group begins, hence how much of its first chunk is skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]

_CUT_BYTES = 4096
"""Parts of a split plan end at multiples of this, counted from its beginning."""


@dataclass(frozen=True, slots=True)
class Side:
    """One tensor on one side of the transfer: `count` rows, row i at `base + i * stride`. Bytes."""

    base: int
    stride: int
    count: int


@dataclass(frozen=True, slots=True)
class TensorPair:
    """A KV cache tensor and its place in the tier.

    Attributes:
        blocks: rows are blocks.
        chunks: rows are chunks; block j of a chunk starts `j * page_bytes` into its row.
        page_bytes: size of a block in this tensor, padding included.
    """

    blocks: Side
    chunks: Side
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Ref:
    """What one layer uses of a tensor: the first `used_bytes` of each page."""

    tensor: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class TierLayout:
    """Addresses of both sides, fixed for the life of a worker.

    Raises:
        ValueError: a reference leaves its page, or a chunk's row is shorter than its blocks.
    """

    pairs: tuple[TensorPair, ...]
    groups: tuple[tuple[Ref, ...], ...]
    blocks_per_chunk: int

    def __post_init__(self) -> None:
        if self.blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk must be at least 1, got {self.blocks_per_chunk}")
        for refs in self.groups:
            for ref in refs:
                if not 0 <= ref.tensor < len(self.pairs):
                    raise ValueError(f"a layer refers to tensor {ref.tensor} of {len(self.pairs)}")
                if not 0 < ref.used_bytes <= self.pairs[ref.tensor].page_bytes:
                    raise ValueError(
                        f"a layer uses {ref.used_bytes} bytes of a page of {self.pairs[ref.tensor].page_bytes}"
                    )
        for pair in self.pairs:
            if pair.chunks.count > 1 and pair.chunks.stride < pair.page_bytes * self.blocks_per_chunk:
                raise ValueError(f"a chunk's row of {pair.chunks.stride} bytes cannot hold its blocks")


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Byte ranges to copy: `size[i]` bytes from address `src[i]` to `dst[i]`; neighbours are merged."""

    src: Addresses
    dst: Addresses
    size: Addresses
    total_bytes: int


def plan_store(
    layout: TierLayout,
    blocks: NDArray[np.integer],
    chunks: NDArray[np.integer],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
) -> CopyPlan:
    """Plan of a copy from blocks to chunks; see `_ranges` for the arguments and errors."""
    block_side, chunk_side, size = _ranges(layout, blocks, chunks, group_sizes, block_indices)
    return _merged(block_side, chunk_side, size)


def plan_load(
    layout: TierLayout,
    blocks: NDArray[np.integer],
    chunks: NDArray[np.integer],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
) -> CopyPlan:
    """Plan of a copy from chunks to blocks; see `_ranges` for the arguments and errors."""
    block_side, chunk_side, size = _ranges(layout, blocks, chunks, group_sizes, block_indices)
    return _merged(chunk_side, block_side, size)


def _ranges(
    layout: TierLayout,
    blocks: NDArray[np.integer],
    chunks: NDArray[np.integer],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
) -> tuple[Addresses, Addresses, Addresses]:
    """One range per (layer reference, block): addresses in the KV cache, in the tier, and sizes.

    Args:
        layout: addresses of both sides.
        blocks: block ids, group after group.
        chunks: chunk ids, group after group.
        group_sizes: how many of `blocks` belong to each group.
        block_indices: index, in the request, of each group's first block.

    Raises:
        ValueError: the lists do not fit together or an id is out of range. Copying anyway would corrupt memory.
    """
    if not len(group_sizes) == len(block_indices) == len(layout.groups):
        raise ValueError(
            f"a transfer for {len(group_sizes)} groups ({len(block_indices)} indices) met a cache of "
            f"{len(layout.groups)} groups"
        )
    block_parts: list[Addresses] = []
    chunk_parts: list[Addresses] = []
    size_parts: list[Addresses] = []
    block_at = chunk_at = 0
    for refs, count, first_index in zip(layout.groups, group_sizes, block_indices, strict=True):
        if count == 0:
            continue
        skipped = first_index % layout.blocks_per_chunk
        slot = np.arange(skipped, skipped + count)
        chunk_count = -(-(skipped + count) // layout.blocks_per_chunk)
        group_blocks = blocks[block_at : block_at + count]
        group_chunks = chunks[chunk_at : chunk_at + chunk_count]
        if len(group_blocks) != count or len(group_chunks) != chunk_count:
            raise ValueError(
                f"a transfer lists {len(blocks)} blocks and {len(chunks)} chunks, fewer than its groups need"
            )
        block_at += count
        chunk_at += chunk_count
        chunk_of_slot = group_chunks[slot // layout.blocks_per_chunk].astype(np.int64)
        place = slot % layout.blocks_per_chunk
        for ref in refs:
            pair = layout.pairs[ref.tensor]
            _check_ids("block", group_blocks, pair.blocks.count)
            _check_ids("chunk", group_chunks, pair.chunks.count)
            block_parts.append(_addresses(pair.blocks, group_blocks.astype(np.int64)))
            chunk_parts.append(_addresses(pair.chunks, chunk_of_slot, place * pair.page_bytes))
            size_parts.append(np.full(count, ref.used_bytes, dtype=np.uint64))
    if block_at != len(blocks) or chunk_at != len(chunks):
        raise ValueError(
            f"a transfer lists {len(blocks)} blocks and {len(chunks)} chunks, but its groups cover {block_at} and "
            f"{chunk_at}"
        )
    if not size_parts:
        empty = np.empty(0, dtype=np.uint64)
        return empty, empty, empty
    return np.concatenate(block_parts), np.concatenate(chunk_parts), np.concatenate(size_parts)


def _check_ids(kind: str, ids: NDArray[np.integer], count: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= count:
        raise ValueError(f"a transfer names {kind} {low if low < 0 else high}, but there are only {count}")


def _addresses(side: Side, rows: NDArray[np.int64], offset: NDArray[np.int64] | int = 0) -> Addresses:
    return (rows * side.stride + offset).astype(np.uint64) + np.uint64(side.base)


def _merged(src: Addresses, dst: Addresses, size: Addresses) -> CopyPlan:
    """Sort by source address and join ranges that continue each other on both sides."""
    if len(size) == 0:
        return CopyPlan(src, dst, size, 0)
    order = np.argsort(src, kind="stable")
    src, dst, size = src[order], dst[order], size[order]
    joins = (src[:-1] + size[:-1] == src[1:]) & (dst[:-1] + size[:-1] == dst[1:])
    starts = np.concatenate(([0], np.flatnonzero(~joins) + 1))
    return CopyPlan(src[starts], dst[starts], np.add.reduceat(size, starts), int(size.sum()))


def split(plan: CopyPlan, parts: int) -> list[CopyPlan]:
    """Plans that together copy what `plan` does, of about equal bytes, `parts` at most; a range may be cut in two."""
    ends = np.cumsum(plan.size)
    bounds = [plan.total_bytes * i // parts // _CUT_BYTES * _CUT_BYTES for i in range(parts)] + [plan.total_bytes]
    out: list[CopyPlan] = []
    for low, high in itertools.pairwise(bounds):
        if low == high:
            continue
        first = int(np.searchsorted(ends, np.uint64(low), side="right"))
        last = int(np.searchsorted(ends, np.uint64(high), side="left"))
        src, dst, size = (column[first : last + 1].copy() for column in (plan.src, plan.dst, plan.size))
        beyond = int(ends[last]) - high
        before = low - (int(ends[first]) - int(plan.size[first]))
        size[-1] -= np.uint64(beyond)
        src[0] += np.uint64(before)
        dst[0] += np.uint64(before)
        size[0] -= np.uint64(before)
        out.append(CopyPlan(src, dst, size, high - low))
    return out
