"""What a store is told, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.segments.format import (
    ALIGN,
    MAX_KEY_BYTES,
    NAMESPACE_BYTES,
    aligned,
    batch_header_bytes,
    footer_bytes,
    smallest_segment,
)

MIB = 1 << 20
GIB = 1 << 30

BATCH_BYTES = 16 * MIB
MAX_SEGMENT_BYTES = 256 * MIB
READERS = 8

_SEGMENTS_IN_BUDGET = 8
"""One of them is kept free to write to while another is being emptied, so fewer would waste much of a small budget."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Sizes in bytes, times in seconds.

    Attributes:
        root: folder of all namespaces; budget and floor are for it as a whole. Created with mode 0700.
        name: folder of this namespace inside `root`.
        namespace: digest of everything that changes the bytes of a block, `NAMESPACE_BYTES` long. In every segment.
        block_bytes: size of a block; one size for the whole store.
        budget_bytes: what all segments under `root` may take.
        floor_bytes: free space that is kept on the file system.
        max_segment_bytes: of a segment file; smaller where the budget is small (see `segment_bytes`). The device is
            told to empty its cache when a segment is full, beside the next one, and whenever there is nothing to write:
            a power cut loses at most two segments, a crash of the process only what is being written.
        batch_bytes: payload that is written at once: at least one block, and never most of a segment.
        staging_bytes: memory in which blocks wait for the disk, taken at start.
        backlog_bytes: blocks that may wait for staging memory. What is put beyond it is refused: the disk is slower.
        put_wait_s: the longest that a block waits for staging memory, and its memory in the tier above is held.
        readers: threads that load; each has a buffer of `read_bytes`.
        read_bytes: what one reader reads at once; a longer load is shared by several readers.
        rewrite_share: of an evicted segment's bytes, how much is kept by writing it again if it was used. Bounds write
            amplification to 1 / (1 - share).
        open_files: segment files kept open.
        about: what the namespace is, for people: written to a file beside the segments once.
    """

    root: Path
    name: str
    namespace: bytes
    block_bytes: int
    budget_bytes: int
    floor_bytes: int
    max_segment_bytes: int = MAX_SEGMENT_BYTES
    batch_bytes: int = BATCH_BYTES
    staging_bytes: int = 64 * MIB
    backlog_bytes: int = GIB
    put_wait_s: float = 2.0
    readers: int = READERS
    read_bytes: int = 6 * MIB
    rewrite_share: float = 0.25
    open_files: int = 256
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """
        Raises:
            SettingsError: the budget does not hold a few segments.
            ValueError: a value that only a programming error can produce.
        """
        if len(self.namespace) != NAMESPACE_BYTES:
            raise ValueError(f"namespace must have {NAMESPACE_BYTES} bytes, got {len(self.namespace)}")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"name must be the name of a visible folder, got {self.name!r}")
        if self.block_bytes <= 0 or self.readers < 1:
            raise ValueError("block_bytes and readers must be positive")
        if not 0 <= self.rewrite_share < 1:
            raise ValueError(f"rewrite_share must be at least 0 and below 1, got {self.rewrite_share}")
        least = _SEGMENTS_IN_BUDGET * smallest_segment(self.block_bytes)
        if self.budget_bytes < least:
            raise SettingsError(
                f"The SSD tier's budget of {self.budget_bytes / GIB:.3f} GiB is too small for blocks of "
                f"{self.block_bytes / MIB:.2f} MiB; give it at least {least / GIB:.3f} GiB."
            )

    @property
    def folder(self) -> Path:
        """Where this namespace's segments are."""
        return self.root / self.name

    @property
    def stride(self) -> int:
        """What a block takes in a segment and in memory here."""
        return aligned(self.block_bytes)

    @property
    def segment_bytes(self) -> int:
        """Of a segment file that is being written; a finished one may be smaller."""
        share = self.budget_bytes // _SEGMENTS_IN_BUDGET // ALIGN * ALIGN
        return max(smallest_segment(self.block_bytes), min(aligned(self.max_segment_bytes), share))

    @property
    def batch_blocks(self) -> int:
        """The most blocks of a batch."""
        count = max(1, min(self.batch_bytes, self.segment_bytes // 4) // self.stride)
        while count > 1 and self._bytes_of(count) > self.segment_bytes:
            count -= 1
        return count

    def _bytes_of(self, count: int) -> int:
        """Of a segment with one batch of `count` blocks, whatever their keys."""
        keys = count * MAX_KEY_BYTES
        return ALIGN + batch_header_bytes(count, keys) + count * self.stride + footer_bytes(count, keys)
