"""Pieces of a batch that are neighbours become one request: a disk likes few large ones.

Pure: decides what goes together, moves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_pd.kv_offload.block_io.base import OpenFile, Piece

LONG_BYTES = 512 << 10
"""From so many bytes on, on average, each request is worth a system call of its own. On a virtual NVMe disk the store
read blocks that lay alone at 1.5 (NIXL) and 1.0 GB/s (threads) with 64 KiB, 2.3 and 2.1 with 256 KiB, 2.0 and 2.3 with
512 KiB, and neighbours, 1 MiB together or more, at 1.9 and 2.3; with the bare disk at 2.5 to 3.0."""


@dataclass(slots=True)
class Request:
    """One contiguous range of a file, of one or more pieces.

    Attributes:
        pieces: their indices in the batch, in the order of their offsets.
        memory: (address, length) of each contiguous range of memory, in the same order.
    """

    file: OpenFile
    offset: int
    length: int
    pieces: list[int]
    memory: list[tuple[int, int]]


def merge(pieces: Sequence[Piece], *, most_bytes: int, most_ranges: int) -> list[Request]:
    """Requests that together move exactly `pieces`, neighbours in a file together.

    Args:
        most_bytes: a request gets no further piece that would make it longer; a longer single piece stays whole.
        most_ranges: a request has at most so many ranges of memory; with 1, neighbours in the file are merged only
            where they are neighbours in memory too.
    """
    requests: list[Request] = []
    last: Request | None = None
    for index in _by_place(pieces):
        piece = pieces[index]
        if last is not None and _continues(last, piece) and last.length + piece.length <= most_bytes:
            address, length = last.memory[-1]
            adjoins = address + length == piece.address
            if adjoins or len(last.memory) < most_ranges:
                if adjoins:
                    last.memory[-1] = (address, length + piece.length)
                else:
                    last.memory.append((piece.address, piece.length))
                last.length += piece.length
                last.pieces.append(index)
                continue
        last = Request(piece.file, piece.offset, piece.length, [index], [(piece.address, piece.length)])
        requests.append(last)
    return requests


def _by_place(pieces: Sequence[Piece]) -> Iterable[int]:
    """Indices of `pieces`, those of one file together and in the order of their offsets."""
    in_order = all(
        before.file is after.file and before.offset < after.offset for before, after in itertools.pairwise(pieces)
    )
    if in_order:
        return range(len(pieces))
    return sorted(range(len(pieces)), key=lambda index: (id(pieces[index].file), pieces[index].offset))


def _continues(request: Request, piece: Piece) -> bool:
    return piece.file is request.file and piece.offset == request.offset + request.length
