"""How the block index looks in the store: entries of the stream, slabs of blocks and digests. Pure.

A slab is `SLOTS` tier bytes (0: free), then `SLOTS` block keys: 16 bytes a block, and a run of blocks is one write.
Decoders raise ValueError on anything of another shape and ignore fields that a newer version added.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.state.base import Epoch, WorkerId
from vllm_pd.state.block_index import BlockChange, Digest, Holder, Packed, Position, StreamEntry

SLOTS = 2040
"""Blocks in a slab: its 32,640 bytes and the store's own few fill an allocation of 32 KiB."""
SLAB_BYTES = SLOTS * (1 + KEY_BYTES)
CHANGE_BLOCKS = 128
"""Most blocks in one change: with the number of changes in the stream it bounds the stream's memory."""
ALL_TIERS = 7

_RUN = re.compile(rb"([\x01-\x07])\1*", re.DOTALL)
_KEY_BITS = 8 * KEY_BYTES


class _Entry(msgspec.Struct, array_like=True):
    worker: str
    rank: int
    epoch: int
    seq: int
    cleared: bool
    blocks: dict[int, bytes]


_entry_decoder = msgspec.msgpack.Decoder(_Entry)
_digests_decoder = msgspec.msgpack.Decoder(dict[int, tuple[int, bytes]])


def encode_entry(holder: Holder, epoch: Epoch, change: BlockChange) -> bytes:
    entry = _Entry(holder.worker, holder.rank, epoch, change.seq, change.cleared, dict(change.blocks))
    return msgspec.msgpack.encode(entry)


def decode_entry(position: Position, data: bytes) -> StreamEntry:
    """Raises ValueError when `data` is no entry."""
    entry = _entry_decoder.decode(data)
    if entry.seq < 1 or entry.rank < 0:
        raise ValueError("no change has that number, or no engine that rank")
    for bits, packed in entry.blocks.items():
        if not 0 <= bits <= ALL_TIERS or len(packed) % KEY_BYTES:
            raise ValueError("tier bits or block keys of another shape")
    change = BlockChange(entry.seq, entry.cleared, entry.blocks)
    return StreamEntry(position, Holder(WorkerId(entry.worker), entry.rank), Epoch(entry.epoch), change)


def pieces(changed: Mapping[int, Packed]) -> Iterator[dict[int, Packed]]:
    """Split a change into such of at most `CHANGE_BLOCKS` blocks each, in order."""
    limit = CHANGE_BLOCKS * KEY_BYTES
    piece: dict[int, Packed] = {}
    room = limit
    for bits, packed in changed.items():
        at = 0
        while at < len(packed):
            part = packed[at : at + room]
            piece[bits] = part
            at += len(part)
            room -= len(part)
            if not room:
                yield piece
                piece, room = {}, limit
    if piece:
        yield piece


def runs(tiers: bytes | bytearray) -> Iterator[tuple[int, int, int]]:
    """(start, end, tier bits) of each run of used slots with equal bits."""
    for match in _RUN.finditer(tiers):
        yield match.start(), match.end(), tiers[match.start()]


def blocks_of_slab(slab: bytes, into: dict[int, list[Packed]]) -> None:
    """Add the blocks of a slab to lists by tier bits.

    Raises:
        ValueError: `slab` is none.
    """
    if len(slab) != SLAB_BYTES:
        raise ValueError("a slab has another length")
    tiers = slab[:SLOTS]
    if max(tiers) > ALL_TIERS:
        raise ValueError("a slab names a tier that does not exist")
    for start, end, bits in runs(tiers):
        into.setdefault(bits, []).append(slab[SLOTS + start * KEY_BYTES : SLOTS + end * KEY_BYTES])


def xor_of(packed: Packed) -> int:
    """XOR of all keys: halves are folded onto each other, which costs nanoseconds a key."""
    value = int.from_bytes(packed, "little")
    count = len(packed) // KEY_BYTES
    while count > 1:
        half = (count + 1) // 2
        upper = value >> (half * _KEY_BITS)
        value = (value ^ (upper << (half * _KEY_BITS))) ^ upper
        count = half
    return value


def digest_of(packed: Packed) -> Digest:
    """Digest of some keys, which must be different ones."""
    return Digest(len(packed) // KEY_BYTES, xor_of(packed))


def encode_digests(digests: Mapping[int, Digest]) -> bytes:
    return msgspec.msgpack.encode(
        {bits: (each.blocks, each.xor.to_bytes(KEY_BYTES, "little")) for bits, each in digests.items() if each.blocks}
    )


def decode_digests(data: bytes) -> dict[int, Digest]:
    """Raises ValueError when `data` holds no digests."""
    return {
        bits: Digest(blocks, int.from_bytes(xor, "little"))
        for bits, (blocks, xor) in _digests_decoder.decode(data).items()
    }


def order(position: Position) -> tuple[int, int]:
    """What positions are compared by. Raises ValueError when it is none."""
    ms, _, number = position.partition("-")
    return int(ms), int(number)
