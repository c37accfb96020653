"""The caches of one worker: one feed for each engine (data-parallel rank) that publishes KV events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from vllm_pd.agent.cache_feed import CacheFeed
from vllm_pd.agent.kv_event_source import EventEndpoints
from vllm_pd.errors import StoreError
from vllm_pd.state.base import WorkerRecord
from vllm_pd.state.block_index import BlockIndex, BlockWriter, Holder

logger = logging.getLogger("vllm.vllm_pd")

_TTL_LEASES = 3
"""Blocks outlive the lease of a worker that is out of touch, so that a short outage costs no new announcement."""


class CacheFeeds:
    """Starts, stops and pauses the feeds together. All methods are for one loop.

    Args:
        record: the worker.
        index: where its blocks are written.
        sources: the engines and where each publishes; may change when engines are added, removed or replaced.
        lease_s: the worker's lease.
    """

    def __init__(
        self,
        record: WorkerRecord,
        index: BlockIndex,
        sources: Callable[[], Mapping[int, EventEndpoints]],
        lease_s: float,
    ) -> None:
        self._record = record
        self._index = index
        self._sources = sources
        self._lease_s = lease_s
        self._allowed = False
        self._complained = False
        self._feeds: dict[int, CacheFeed] = {}
        self._writers: dict[int, BlockWriter] = {}
        """Kept for engines that come back: their history must go on where it ended."""

    @property
    def feeds(self) -> tuple[CacheFeed, ...]:
        return tuple(self._feeds.values())

    async def match(self) -> None:
        """Follow every engine that there is now, and no other. Never raises: a worker is of use without its index."""
        try:
            wanted = self._sources()
        except Exception:
            if not self._complained:
                logger.exception("vllm-pd: the engines cannot be asked for their KV events; asking again")
            self._complained = True
            return
        self._complained = False
        for rank in [rank for rank, feed in self._feeds.items() if wanted.get(rank) != feed.endpoints]:
            feed = self._feeds.pop(rank)
            await feed.stop()
            try:
                await feed.feeder.remove()
            except StoreError as e:
                logger.debug("the index forgets rank %d by itself: %s", rank, e)
        for rank, endpoints in wanted.items():
            if rank not in self._feeds:
                self._feeds[rank] = self._start(rank, endpoints)

    def allow(self, allowed: bool) -> None:
        """Whether this process may write to the index: another one may own the worker's place."""
        self._allowed = allowed
        for feed in self.feeds:
            feed.feeder.allow(allowed)

    def check(self) -> None:
        """Look soon whether the store still has what was written."""
        for feed in self.feeds:
            feed.feeder.check()

    async def remove(self) -> None:
        """Stop, and take the caches out of the index.

        Raises:
            StoreError: the store did not answer; the index forgets the caches by itself.
        """
        await asyncio.gather(*(feed.stop() for feed in self.feeds))
        await asyncio.gather(*(feed.feeder.remove() for feed in self.feeds))

    async def close(self) -> None:
        """Stop and release connections; the index stays as it is. Idempotent."""
        await asyncio.gather(*(feed.stop() for feed in self.feeds))
        await self._index.close()

    def _start(self, rank: int, endpoints: EventEndpoints) -> CacheFeed:
        holder = Holder(self._record.id, rank)
        ttl_ms = int(self._lease_s * 1000) * _TTL_LEASES
        if rank not in self._writers:
            self._writers[rank] = self._index.writer(self._record.pool.id, holder, self._record.epoch, ttl_ms)
        feed = CacheFeed(holder, self._writers[rank], endpoints, ttl_ms=ttl_ms, renew_s=self._lease_s / 2)
        feed.start()
        feed.feeder.allow(self._allowed)
        logger.info("vllm-pd: following the KV events of rank %d at %s.", rank, endpoints.live)
        return feed
