"""Writes the changes of one engine's cache to the block index.

Only the newest state of a block matters, so changes wait in one place per block and go out in batches: at once when
nothing else is under way, together when the store is the slower side. A store that is away or too slow costs memory up
to a bound; beyond it the changes are dropped and, once the store takes them again, the whole truth is announced
instead.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from vllm_pd.agent.block_truth import BlockTruth, Changes
from vllm_pd.block_hash import BlockKey
from vllm_pd.errors import IndexLost, StoreError
from vllm_pd.state.block_index import BlockWriter, Packed

logger = logging.getLogger("vllm.vllm_pd")

# A write of five hundred changes costs little more than one of ten, and takes longer the busier this machine or the
# store is: writing for at most a fifth of the time makes the writes fewer and larger just then.
_GATHER_CALLS = 4


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """Times in seconds.

    Attributes:
        batch_blocks: most blocks in one write.
        waiting_blocks: changes that may wait before they are dropped in favour of a new announcement.
        gather_s: how long a change may wait for company, counted from the write before it: at least and at most. In
            between it is `_GATHER_CALLS` times as long as that write took.
        announce_s: least time between two announcements, so that a store that is too slow for the changes is not
            given more to do instead.
        backoff_s: pause after a failure; doubled each time, up to the second.
    """

    batch_blocks: int = 1024
    waiting_blocks: int = 65_536
    gather_s: tuple[float, float] = (0.002, 0.025)
    announce_s: float = 1.0
    backoff_s: tuple[float, float] = (0.1, 5.0)


@dataclass(slots=True)
class FeedStats:
    """What a feeder has done since it started."""

    blocks: int = 0
    """Written one by one, not counting announcements."""
    batches: int = 0
    errors: int = 0
    announcements: int = 0
    overflows: int = 0
    delay_s: float = 0.0
    """How long the changes of the newest batch had waited, at most, when the store had them (those that a full batch
    left behind: since then)."""


class IndexFeeder:
    """Feeds one cache's writer. All methods are for one loop.

    Args:
        writer: the cache's writer.
        truth: what the changes come from; announced whole when the changes alone do not do.
        ttl_ms: how long the index keeps what was written without hearing from us.
        renew_s: seconds between renewals.
        name: of the cache, for messages.
    """

    def __init__(
        self,
        writer: BlockWriter,
        truth: BlockTruth,
        *,
        ttl_ms: int,
        renew_s: float,
        name: str,
        limits: FeedLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = writer
        self._truth = truth
        self._ttl_ms = ttl_ms
        self._renew_s = renew_s
        self._name = name
        self._limits = limits or FeedLimits()
        self._clock = clock
        self.stats = FeedStats()
        self._waiting: dict[BlockKey, int] = {}
        self._oldest = 0.0
        self._announce = True
        self._allowed = False
        self._wake = asyncio.Event()
        self._failures = 0
        self._complained = False
        self._next_write = 0.0
        self._next_announcement = 0.0
        self._next_renewal = 0.0

    @property
    def waiting(self) -> int:
        """Blocks whose change the store does not have yet."""
        return len(self._truth) if self._announce else len(self._waiting)

    def push(self, changes: Changes) -> None:
        """Take what a batch of events changed. Never waits."""
        if self._announce:
            # The announcement will say it.
            return
        if changes.everything:
            self._start_over()
        elif changes.blocks:
            first = not self._waiting
            if first:
                self._oldest = self._clock()
            self._waiting.update(changes.blocks)
            if len(self._waiting) > self._limits.waiting_blocks:
                self.stats.overflows += 1
                self._start_over()
            elif not first and len(self._waiting) < self._limits.batch_blocks:
                # It is known when the ones before these are due, and these go with them.
                return
        else:
            return
        self._wake.set()

    def allow(self, allowed: bool) -> None:
        """Whether this process may write: another one may own this worker's place. Writing begins with all there is."""
        if allowed == self._allowed:
            return
        self._allowed = allowed
        self._start_over()
        self._wake.set()

    def check(self) -> None:
        """Look soon whether the store still has what was written: it may have come back empty."""
        self._next_renewal = 0.0
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            delay = self._due_in()
            if delay > 0:
                await self._pause(delay)
                continue
            try:
                await self._step()
                self._failures, self._complained = 0, False
            except Exception as e:
                # Not only StoreError: an unforeseen error must cost one try, not the rest of this worker's life.
                await self._on_error(e)

    async def remove(self) -> None:
        """Take this cache out of the index; for the end, after `run` was cancelled.

        Raises:
            StoreError: the store did not answer; the index forgets the cache by itself.
        """
        if self._allowed:
            await self._writer.remove()

    def _due_in(self) -> float:
        """Seconds until there is something to do."""
        if not self._allowed:
            return self._renew_s
        now = self._clock()
        if self._announce:
            return self._next_announcement - now
        renewal = self._next_renewal - now
        if not self._waiting:
            return renewal
        if len(self._waiting) >= self._limits.batch_blocks:
            return 0.0
        return min(renewal, self._next_write - now)

    async def _step(self) -> None:
        now = self._clock()
        if self._announce:
            self._announce = False
            self._waiting.clear()
            self._next_announcement = now + self._limits.announce_s
            await self._writer.replace(self._truth.held())
            self.stats.announcements += 1
        elif now >= self._next_renewal:
            await self._writer.renew(self._ttl_ms)
        else:
            oldest = self._oldest
            batch = self._take_batch()
            await self._writer.write(_packed(batch))
            self.stats.blocks += len(batch)
            self.stats.batches += 1
            ended = self._clock()
            self.stats.delay_s = ended - oldest
            least, most = self._limits.gather_s
            self._next_write = ended + min(most, max(least, _GATHER_CALLS * (ended - now)))
            return
        # Earlier by up to a fifth: workers that started together must not beat together for ever.
        self._next_renewal = now + self._renew_s * random.uniform(0.8, 1.0)

    def _take_batch(self) -> dict[BlockKey, int]:
        """The changes that came first."""
        limit = self._limits.batch_blocks
        if len(self._waiting) <= limit:
            batch, self._waiting = self._waiting, {}
        else:
            batch = dict(islice(self._waiting.items(), limit))
            for key in batch:
                del self._waiting[key]
            self._oldest = self._clock()
        return batch

    def _start_over(self) -> None:
        self._announce = True
        self._waiting.clear()

    async def _on_error(self, error: Exception) -> None:
        self.stats.errors += 1
        self._start_over()
        if isinstance(error, IndexLost):
            # The store answers; it only has to hear everything again.
            logger.info("vllm-pd: the blocks of %s are announced again: %s", self._name, error)
        elif not self._complained:
            self._complained = True
            logger.warning(
                "vllm-pd: the blocks of %s cannot be written to the index, trying again until they can: %s",
                self._name,
                error,
                exc_info=not isinstance(error, StoreError),
            )
        first, cap = self._limits.backoff_s
        pause = min(cap, first * 2.0 ** min(self._failures, 10)) * random.uniform(0.5, 1.0)
        self._failures += 1
        await asyncio.sleep(pause)

    async def _pause(self, seconds: float) -> None:
        self._wake.clear()
        # What was set between looking and clearing is not lost: nothing runs in between.
        timer = asyncio.get_running_loop().call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()


def _packed(batch: dict[BlockKey, int]) -> dict[int, Packed]:
    lists: defaultdict[int, list[BlockKey]] = defaultdict(list)
    for key, bits in batch.items():
        lists[bits].append(key)
    return {bits: b"".join(keys) for bits, keys in lists.items()}
