"""The messages in which vLLM says what its KV cache stores and removes, decoded as far as the index needs them.

Token ids make up most of a message and are skipped without being built. Fields that a newer vLLM adds are skipped; an
event of a kind that is not known costs that event and not its batch. One of a known kind, or a whole message, that
cannot be read may have said that blocks are gone: then nothing of before is known to be true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

INT_HASHES_ENV = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
"""vLLM publishes the low 64 bits of a block hash as a number, or with "0" the whole as bytes."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks came into a tier. GPU and CPU tiers say so once for each copy they make of a block.

    Attributes:
        block_hashes: whole hashes; integers when vLLM runs with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1.
        medium: "GPU", "CPU" or "STORAGE".
        group_idx: KV cache group of a hybrid model.
        kv_cache_spec_kind: what kind of layers the group has; the CPU tier may leave it out.
    """

    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Copies of blocks left a tier. Without any hash: the tier was emptied (vLLM itself never sends that)."""

    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The GPU's prefix cache was reset; tiers below keep what they have."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one message, in order, and how many others in it could not be read.

    Attributes:
        events: those that are of use; after a loss, those that came after it.
        unreadable: how many could not be read, of kinds that are not known too.
        problem: why the first of them could not, or the first that is a loss; empty when all were read.
        lost: whether whatever was known before `events` may be wrong.
    """

    events: Sequence[Event]
    unreadable: int = 0
    problem: str = ""
    lost: bool = False


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Event]


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


class _Tagged(msgspec.Struct, gc=False):
    type: str


_KINDS = frozenset(kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared))
_tag_decoder = msgspec.msgpack.Decoder(_Tagged)
_batch_decoder = msgspec.msgpack.Decoder(_Batch)
_raw_decoder = msgspec.msgpack.Decoder(_RawBatch)
_event_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Event)


def decode(payload: bytes) -> EventBatch:
    """The events of a message. Never raises: what cannot be read is counted."""
    try:
        return EventBatch(_batch_decoder.decode(payload).events)
    except msgspec.DecodeError:
        # Also a ValidationError: one event is of another kind or shape.
        return _decode_one_by_one(payload)


def _decode_one_by_one(payload: bytes) -> EventBatch:
    try:
        raw = _raw_decoder.decode(payload).events
    except msgspec.DecodeError as e:
        return EventBatch((), 1, str(e), lost=True)
    events: list[Event] = []
    unreadable, problem, lost = 0, "", False
    for item in raw:
        try:
            events.append(_event_decoder.decode(item))
        except msgspec.DecodeError as e:
            unreadable += 1
            if _is_of_another_kind(item):
                problem = problem or str(e)
                continue
            if not lost:
                problem, lost = str(e), True
            events.clear()
    return EventBatch(events, unreadable, problem, lost)


def _is_of_another_kind(item: msgspec.Raw) -> bool:
    """Whether an event says that it is none of those that change what is known."""
    try:
        return _tag_decoder.decode(item).type not in _KINDS
    except msgspec.DecodeError:
        return False
