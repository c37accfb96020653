"""The messages in which vLLM says what its KV cache stores and removes, decoded as far as the index needs them.

Token ids make up most of a message and are skipped without being built. Fields that a newer vLLM adds are skipped; an
event of a kind that is not known, or of another shape, costs that event and not its batch.
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
    """The events of one message, in order, and how many others in it could not be read."""

    events: Sequence[Event]
    unreadable: int = 0
    problem: str = ""
    """Why the first unreadable one was; empty when all were read."""


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Event]


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


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
        return EventBatch((), 1, str(e))
    events: list[Event] = []
    problem = ""
    for item in raw:
        try:
            events.append(_event_decoder.decode(item))
        except msgspec.DecodeError as e:
            problem = problem or str(e)
    return EventBatch(events, len(raw) - len(events), problem)
