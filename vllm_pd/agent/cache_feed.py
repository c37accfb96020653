"""One engine's cache, from its KV events to the block index: source, truth and feeder together."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

from vllm_pd.agent.block_truth import BlockTruth
from vllm_pd.agent.index_feeder import FeedLimits, IndexFeeder
from vllm_pd.agent.kv_event_source import EventEndpoints, KvEventSource, SourceLimits
from vllm_pd.agent.kv_events import INT_HASHES_ENV, EventBatch, decode
from vllm_pd.background import end_tasks
from vllm_pd.state.block_index import BlockWriter, Holder

logger = logging.getLogger("vllm.vllm_pd")

RETRY_S = 5.0
"""Seconds after which events are followed anew that an unforeseen error ended the following of."""


class CacheFeed:
    """Keeps the index of one cache equal to the cache. Made, run and stopped in one loop.

    Args:
        holder: the cache.
        writer: its writer.
        endpoints: where its engine publishes; None when messages are handed to `message` by other means.
        ttl_ms: how long the index keeps what was written without hearing from us.
        renew_s: seconds between renewals.
    """

    def __init__(
        self,
        holder: Holder,
        writer: BlockWriter,
        endpoints: EventEndpoints | None,
        *,
        ttl_ms: int,
        renew_s: float,
        source_limits: SourceLimits | None = None,
        feed_limits: FeedLimits | None = None,
    ) -> None:
        self.holder = holder
        self.endpoints = endpoints
        self.truth = BlockTruth()
        name = f"{holder.worker} rank {holder.rank}"
        self.feeder = IndexFeeder(writer, self.truth, ttl_ms=ttl_ms, renew_s=renew_s, name=name, limits=feed_limits)
        self._open = functools.partial(KvEventSource, endpoints, self, source_limits) if endpoints is not None else None
        self.source: KvEventSource | None = None
        self.unreadable = 0
        """Messages and events that could not be read."""
        self.losses = 0
        """Messages among which some could have said that blocks are gone."""
        self._name = name
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin, in the running loop. Nothing is written before `feeder.allow(True)`."""
        self._tasks.append(asyncio.create_task(self.feeder.run()))
        if self._open is not None:
            self._tasks.append(asyncio.create_task(self._follow(self._open)))

    async def stop(self) -> None:
        """End; the index stays as it is. Idempotent."""
        tasks, self._tasks = self._tasks, []
        await end_tasks(tasks)

    def message(self, payload: bytes) -> None:
        """Take the engine's next message."""
        batch = decode(payload)
        if batch.unreadable:
            self._note_unreadable(batch)
        if batch.lost:
            self.lost()
        unused = self.truth.ignored
        changes = self.truth.apply(batch.events)
        if self.truth.ignored != unused and not unused:
            logger.warning(
                "vllm-pd: a KV event of %s cannot be used, so blocks are missing in the index; "
                "start the worker without %s=1.",
                self._name,
                INT_HASHES_ENV,
            )
        self.feeder.push(changes)

    def _note_unreadable(self, batch: EventBatch) -> None:
        if batch.lost and not self.losses:
            logger.error(
                "vllm-pd: a KV event of %s cannot be read, so the index forgets what it knew of this cache each time "
                "one comes: %s; install the vllm-pd that belongs to this vLLM.",
                self._name,
                batch.problem,
            )
        elif not self.unreadable:
            logger.warning("vllm-pd: a KV event of %s is of an unknown kind: %s", self._name, batch.problem)
        self.losses += batch.lost
        self.unreadable += batch.unreadable

    def lost(self) -> None:
        """Nothing that was learned so far is known to be true any more."""
        self.feeder.push(self.truth.forget())

    async def _follow(self, open_source: Callable[[], KvEventSource]) -> None:
        complained = False
        while True:
            self.source = open_source()
            try:
                await self.source.run()
            except Exception:
                log = logger.debug if complained else logger.error
                log(
                    "vllm-pd: the KV events of %s cannot be followed; its blocks leave the index, trying again",
                    self._name,
                    exc_info=True,
                )
                complained = True
            # Without its events nothing is known of this cache, so nothing must be claimed.
            self.lost()
            await asyncio.sleep(RETRY_S)
