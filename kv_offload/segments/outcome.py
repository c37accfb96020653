"""What the store tells its user: results of single requests, and counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Why a block was not stored or not loaded. The values are labels of metrics."""

    BUSY = "busy"
    """Not stored: the disk is slower than what is put."""
    NO_SPACE = "no_space"
    """Not stored: budget, free-space floor or disk are full and nothing can be evicted now."""
    WRITE_FAILED = "write_failed"
    """Not stored: the disk refused a write, or did so a moment ago and is left alone for a while."""
    ABSENT = "absent"
    """Not loaded: not stored, or evicted in the meantime."""
    LATE = "late"
    """Not loaded before the deadline. The block stays stored."""
    READ_FAILED = "read_failed"
    """Not loaded: the read failed or was short. The block has left the index."""
    CORRUPT = "corrupt"
    """Not loaded: the bytes are not those that were stored. The block has left the index."""
    CLOSED = "closed"
    """The store is closed or closing."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a `put` or `get`. Its sources or targets are not touched after this.

    Attributes:
        ticket: as it was given.
        ok: in the order they were given. Loaded: the whole block is in its target. Put: taken over, or there already;
            whether it was really stored shows in `take_changes`.
        failed: the other keys. A target of such a key holds anything.
        bytes: of `ok` blocks that were moved.
        seconds: since the request.
        waited_s: of those, before its first byte was worked on.
        is_load: `get` or `put`.
    """

    ticket: int
    ok: tuple[bytes, ...]
    failed: Mapping[bytes, Reason]
    bytes: int
    seconds: float
    waited_s: float
    is_load: bool


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot. What ends in `_total` only grows, from the store's start.

    Attributes:
        blocks: that can be loaded now.
        segments: files of this namespace.
        used_bytes: of those files.
        recovering: what earlier runs left is still being read.
        writes_off: why nothing is written just now; None when all is well.
        staged_bytes: taken over and not yet written.
        queued_load_bytes: asked for and not yet delivered or failed.
        loads_failed: blocks by reason.
        puts_refused: blocks that `put` refused, by reason.
        puts_lost: blocks that were taken over and could not be written, by reason.
        failed_writes_total: batches, and syncs, that ended with an error of the disk.
        evicted_blocks_total: left with their segment; not those that were kept by writing them again.
        foreign_segments_total: segments of other, unused namespaces removed to make room.
        rejected_segments_total: files that were found at start and cannot be used.
    """

    blocks: int = 0
    segments: int = 0
    used_bytes: int = 0
    recovering: bool = False
    writes_off: Reason | None = None
    staged_bytes: int = 0
    queued_load_bytes: int = 0
    loads_failed: Mapping[Reason, int] = field(default_factory=dict)
    puts_refused: Mapping[Reason, int] = field(default_factory=dict)
    puts_lost: Mapping[Reason, int] = field(default_factory=dict)
    written_blocks_total: int = 0
    written_bytes_total: int = 0
    read_blocks_total: int = 0
    read_bytes_total: int = 0
    duplicate_blocks_total: int = 0
    failed_writes_total: int = 0
    evicted_blocks_total: int = 0
    evicted_segments_total: int = 0
    rewritten_blocks_total: int = 0
    recovered_blocks_total: int = 0
    foreign_segments_total: int = 0
    rejected_segments_total: int = 0
