"""Does the block index hold what the workers say they hold?

With every change a writer states digests of its whole truth. They must equal the digests of what the store holds, also
while the cache changes: what changed during the reading is taken from the stream, as a router would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.errors import IndexLost
from vllm_pd.state.base import Epoch, PoolId, WorkerState
from vllm_pd.state.block_codec import digest_of
from vllm_pd.state.block_index import BlockIndex, Digest, HeldBlocks, Holder, Position, Tier

_ATTEMPTS = 5
_READ_ENTRIES = 64


class Verdict(StrEnum):
    """What was found of a cache."""

    EQUAL = "equal"
    DIFFERS = "differs"
    ABSENT = "absent"
    """A live worker has no cache in the index: its KV events are off, or its agent is out of touch."""
    ORPHAN = "orphan"
    """No live worker has this cache: it ends by itself, and no router reads it."""


@dataclass(frozen=True, slots=True)
class CacheCheck:
    """One cache, compared. Digests are by tier bits."""

    holder: Holder
    epoch: Epoch
    verdict: Verdict
    seq: int = 0
    """The change as of which it was compared."""
    stated: Mapping[int, Digest] = field(default_factory=dict)
    found: Mapping[int, Digest] = field(default_factory=dict)

    def blocks(self, tier: Tier) -> tuple[int, int]:
        """Blocks on a tier: stated by the worker, found in the store."""
        stated, found = (
            sum(digest.blocks for bits, digest in each.items() if bits & tier) for each in (self.stated, self.found)
        )
        return stated, found


async def check_pool(index: BlockIndex, pool: PoolId, workers: Sequence[WorkerState]) -> list[CacheCheck]:
    """Compare every cache of a pool.

    Args:
        workers: the live workers of the pool.

    Raises:
        StoreError: the store did not answer, or blocks were replaced faster than they could be read.
    """
    live = {
        (Holder(worker.record.id, rank), worker.record.epoch)
        for worker in workers
        for rank in range(worker.record.dp_size)
    }
    checks = [await check_cache(index, pool, holder, epoch) for holder, epoch in sorted(live)]
    caches = (await index.stats(pool)).caches
    checks += [
        CacheCheck(cache.holder, cache.epoch, Verdict.ORPHAN, cache.seq)
        for cache in caches
        if (cache.holder, cache.epoch) not in live
    ]
    return checks


async def check_cache(index: BlockIndex, pool: PoolId, holder: Holder, epoch: Epoch) -> CacheCheck:
    """Compare the cache of a live worker."""
    attempts = _ATTEMPTS
    while True:
        attempts -= 1
        after = await index.tail(pool)
        held = await index.held(pool, holder, epoch)
        if held is None:
            return CacheCheck(holder, epoch, Verdict.ABSENT)
        try:
            found = await _as_stated(index, pool, holder, held, after)
        except IndexLost:
            if not attempts:
                raise
            continue
        verdict = Verdict.EQUAL if found == dict(held.stated) else Verdict.DIFFERS
        return CacheCheck(holder, epoch, verdict, held.stated_seq, held.stated, found)


async def _as_stated(
    index: BlockIndex, pool: PoolId, holder: Holder, held: HeldBlocks, after: Position
) -> dict[int, Digest]:
    """Digests of what the cache held at change `stated_seq`.

    Raises:
        IndexLost: the stream does not have the changes up to there.
    """
    blocks: dict[bytes, int] = {}
    _apply(blocks, held.blocks)
    seq = held.seq
    while seq < held.stated_seq:
        entries = await index.read(pool, after, wait_ms=0, limit=_READ_ENTRIES)
        for entry in entries:
            if (entry.holder, entry.epoch) == (holder, held.epoch) and seq < entry.change.seq <= held.stated_seq:
                if entry.change.cleared:
                    blocks.clear()
                _apply(blocks, entry.change.blocks)
                seq = entry.change.seq
        if not entries:
            raise IndexLost(f"The changes of {holder.worker} that came while its blocks were read are gone.")
        after = entries[-1].position
    lists: dict[int, list[bytes]] = {}
    for key, bits in blocks.items():
        lists.setdefault(bits, []).append(key)
    return {bits: digest_of(b"".join(keys)) for bits, keys in lists.items()}


def _apply(blocks: dict[bytes, int], changed: Mapping[int, bytes]) -> None:
    for bits, packed in changed.items():
        for at in range(0, len(packed), KEY_BYTES):
            if bits:
                blocks[packed[at : at + KEY_BYTES]] = bits
            else:
                blocks.pop(packed[at : at + KEY_BYTES], None)
