"""Values and Protocols of the block index: which cache holds which block, on which tier.

Rules that every implementation keeps:
- One cache (`Holder`) has one writer, its agent. A worker start is an epoch; what another epoch wrote is never read.
- The history of a cache is a numbered list of changes. A change states what is true afterwards (absolute tier bits), so
  applying one twice changes nothing, and a snapshot followed by the changes after its number always converges.
- A change and its entry in the event stream are written in one transaction.
- Clearing a cache costs that cache's own blocks, never a scan of the store.
- Everything ends by itself when its writer does; the stream has a bounded length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import NamedTuple, NewType, Protocol

from vllm_pd.state.base import Epoch, PoolId, WorkerId

Position = NewType("Position", str)
"""A place in a pool's event stream. Opaque; `START` comes before everything."""

START = Position("0-0")


class Tier(IntFlag):
    """Where a block is held; a block may be on several tiers at once."""

    NONE = 0
    GPU = 1
    CPU = 2
    SSD = 4


class Holder(NamedTuple):
    """One KV cache: an engine (data-parallel rank) of a worker.

    A tuple, because routers use it as a key per candidate and decision: it hashes five times as fast as a dataclass.
    """

    worker: WorkerId
    rank: int = 0


Packed = bytes
"""Block keys (`block_hash.KEY_BYTES` each) one after the other."""


@dataclass(frozen=True, slots=True)
class BlockChange:
    """One step of a cache's history.

    Attributes:
        seq: 1 for the first change of an epoch, then one more each.
        cleared: nothing of before is held any more; applied before `blocks`.
        blocks: tier bits (0: no longer held) -> packed keys of the blocks for which exactly these bits hold now.
    """

    seq: int
    cleared: bool
    blocks: Mapping[int, Packed]


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """A change as readers of the stream see it."""

    position: Position
    holder: Holder
    epoch: Epoch
    change: BlockChange


@dataclass(frozen=True, slots=True)
class Digest:
    """What two sets of blocks are compared by."""

    blocks: int
    xor: int
    """XOR of all keys, each read as a little-endian number."""


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """A cache's whole content as of change `seq`, or later: the changes after `seq` must still be applied.

    A block that changed while this was read may be missing, or be there with two values; the change settles it.
    """

    epoch: Epoch
    seq: int
    blocks: Mapping[int, Packed]
    """Tier bits (never 0) -> packed keys."""
    stated: Mapping[int, Digest] = field(default_factory=dict)
    """Tier bits -> what the writer says that the cache holds as of change `stated_seq`."""
    stated_seq: int = 0
    """The newest change when reading ended: what changed since `seq` is in the stream."""


class BlockWriter(Protocol):
    """Writes one cache's history. One caller at a time; made by `BlockIndex.writer`.

    Every method has a deadline of its own and raises `StoreError` when the store does not answer, or `IndexLost` when
    the store no longer holds what was written (restarted empty, failed over, evicted). After either, what the store
    holds is unknown, and the next call must be `replace`.
    """

    async def write(self, changed: Mapping[int, Packed]) -> None:
        """State the new tier bits (0: gone) of some blocks: one change, one transaction."""

    async def replace(self, held: Mapping[int, Packed]) -> None:
        """Clear, then state everything that is held, in changes of bounded size. Also the first call of an epoch."""

    async def renew(self, ttl_ms: int) -> None:
        """Keep what was written for at least this long (and at most twice as long). Cheap enough for every heartbeat:
        only what would end soon is touched."""

    async def remove(self) -> None:
        """Forget this cache (a clear in the stream, then its keys). Idempotent."""


class BlockIndex(Protocol):
    """The blocks of all workers, by pool. Deadlines and errors as for `Registry`."""

    def writer(self, pool: PoolId, holder: Holder, epoch: Epoch, ttl_ms: int) -> BlockWriter:
        """The one writer of a cache, made once for an epoch. Its first call must be `replace`."""

    async def tail(self, pool: PoolId) -> Position:
        """The position of the newest entry of the pool's stream now; `START` when there is none."""

    async def read(self, pool: PoolId, after: Position, *, wait_ms: int, limit: int = 256) -> Sequence[StreamEntry]:
        """Entries after a position, oldest first; waits up to `wait_ms` for the first. Unreadable entries are skipped
        and counted. A gap in a cache's `seq` means that changes were lost, unless the later one is `cleared`.

        Raises:
            IndexLost: the stream does not go on from `after`: it has dropped entries that the caller has not seen, or
                the store came back without them. Start over with `tail`, then `held` of every cache.
        """

    async def held(self, pool: PoolId, holder: Holder, epoch: Epoch) -> HeldBlocks | None:
        """What a cache holds, or None when this epoch of it wrote nothing (or it has ended)."""

    async def stats(self, pool: PoolId) -> IndexStats:
        """Sizes, for people."""

    async def clear(self, pool: PoolId) -> int:
        """Remove every key of the pool's index (not of its registry); returns how many. Writers notice at their next
        call (`IndexLost`) and announce again."""

    async def close(self) -> None:
        """Release connections. Idempotent."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """One cache in the store."""

    holder: Holder
    epoch: Epoch
    seq: int
    blocks: Mapping[Tier, int]
    """Tier -> blocks held there."""
    distinct: int
    """Blocks held on any tier."""
    keys: int
    memory_bytes: int
    """As the store counts its own memory; 0 where it cannot say."""


@dataclass(frozen=True, slots=True)
class IndexStats:
    """A pool's index in the store."""

    caches: tuple[CacheStats, ...]
    stream_entries: int
    stream_bytes: int
