"""The SSD below host memory, as vLLM's tiering manager sees it: jobs become tickets of a `SegmentStore`.

Everything here runs in the scheduler's thread and waits for nothing. What cannot be loaded is a miss: vLLM frees the
slots of the failed blocks, asks for them again, gets a miss, and the request goes on with the blocks before them and
computes the rest; `ssd_requests` sees to it that this ends.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload import ssd_metrics
from vllm_pd.kv_offload.adapter_versions import without_version
from vllm_pd.kv_offload.admission import Admission
from vllm_pd.kv_offload.late_offers import LateOffers
from vllm_pd.kv_offload.load_rates import SSD_PRIOR, LoadRate
from vllm_pd.kv_offload.segments import Finished, Reason, Rows, SegmentStore, StoreStats, check
from vllm_pd.kv_offload.ssd_config import SsdConfig
from vllm_pd.kv_offload.ssd_health import SsdHealth
from vllm_pd.kv_offload.ssd_metrics import SsdCounts
from vllm_pd.kv_offload.ssd_namespace import namespace
from vllm_pd.kv_offload.ssd_place import open_place
from vllm_pd.kv_offload.ssd_requests import Request, request_of
from vllm_pd.vllm_compat import (
    LookupResult,
    OffloadingConnectorStats,
    OffloadingEvent,
    OffloadLocality,
    OffloadMedium,
    ReqContext,
    RequestOffloadingContext,
    SecondaryTierManager,
    TierJobResult,
    TierTransferJob,
)

logger = logging.getLogger(f"vllm.{__name__}")

_EVENTS_PER_STEP = 1000
"""Blocks: what an earlier run left must not hold up a step."""
_DRAIN_S = 30.0
_CLOSE_S = 10.0
_SETTLE_S = 5.0
"""An idle engine steps on while blocks are being written or found, unless none came for so long."""


@dataclass(frozen=True, slots=True)
class _Load:
    """A ticket that loads."""

    request: Request
    bytes: int
    queued: int
    """Bytes that were before it."""


class SegmentTier(SecondaryTierManager):  # type: ignore[misc]
    """Built by vLLM's SecondaryTierFactory.

    Args:
        offloading_spec: the spec that the tier belongs to.
        primary_kv_view: (slots, bytes) of host memory; a row is a whole chunk, of all workers.
        ssd: what the user wants.
        options: vLLM's, as for any tier.

    Raises:
        SettingsError: the folder cannot be used, or another process uses it.
    """

    medium = OffloadMedium.STORAGE

    def __init__(
        self,
        *,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        ssd: SsdConfig,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec=offloading_spec, primary_kv_view=primary_kv_view, **options)
        self.locality = OffloadLocality.LOCAL
        self._ssd, self._clock = ssd, clock
        self._slots = primary_kv_view.nbytes // self.block_size_bytes
        self._memory = primary_kv_view.cast("B")
        self._tells = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self._counts = SsdCounts()
        self._namespace = namespace(offloading_spec.config, ssd.identity)
        self._own_namespace = self._namespace
        self._place = open_place(ssd, self._namespace, self.block_size_bytes)
        self._seen = self.store.stats()
        self._shown = _progress(StoreStats())
        """As the metrics have it."""
        self._progress_at = now = clock()
        self._health = SsdHealth(str(self._place.folder), self._counts, self.block_size_bytes, ssd.load_deadline_s)
        share = ssd.budget_bytes // max(1, offloading_spec.config.parallel.data_parallel_size)
        self._admission = Admission(
            self.block_size_bytes, share, ssd.writes_per_day, now, stored_bytes=self._place.found_bytes
        )
        self._late_offers = LateOffers()
        self._load_rate = LoadRate(SSD_PRIOR)
        self._loads: dict[int, _Load] = {}
        self._adapter_of: dict[str, bytes] = {}
        self._under_way: set[str] = set()
        self._outdated = ""
        """Why the store's blocks are not those that the model computes."""
        self._used = False
        self._empty_above = True
        """No request came since the start, or since vLLM's caches were reset."""
        self._done: list[TierJobResult] = []
        self._came: list[bytes] = []
        self._went: list[bytes] = []

    @property
    def store(self) -> SegmentStore:
        """Where the blocks are; another one after `weights_changed`."""
        return self._place.store

    # What the cost gate asks.

    @property
    def load_rate(self) -> LoadRate:
        """How fast loads are."""
        return self._load_rate

    @property
    def queued_load_bytes(self) -> int:
        """Of loads that were submitted and have not ended."""
        return sum(load.bytes for load in self._loads.values())

    def holds(self, key: bytes, req_context: ReqContext) -> bool:
        """Whether a load of this block would be tried now for this request."""
        return self._health.may_load and not self._outdated and self._loadable(key, request_of(req_context))

    # What the connector says.

    def has_adapter(self, request_id: str, version: bytes) -> None:
        """A request that is about to come is computed with an adapter of this version, see `adapter_versions`."""
        self._adapter_of[request_id] = version

    def weights_changed(self, why: str) -> bool:
        """The model computes other KV from now on: nothing that was stored is loaded again by this server.

        vLLM's caches above may hold KV of the former weights, and serve and offer it, until they are reset. Unless they
        are empty, the tier neither stores nor serves anything until then.

        Returns:
            Whether blocks that were told of are gone.
        """
        if self._outdated or (self._empty_above and self._namespace is not self._own_namespace and not self._used):
            return False
        self._outdated = why
        if self._empty_above:
            self._begin_anew()
            return True
        logger.warning(
            "vllm-pd: the SSD tier is not used: the model's weights may have changed (%s), and vLLM's caches may hold "
            "blocks of the former ones. It begins anew when all caches are reset with no request running (POST "
            "/reset_prefix_cache?reset_external=true).",
            why,
        )
        return True

    def caches_were_reset(self) -> None:
        """Neither the device nor host memory has a block any more, and no request holds one."""
        if self._outdated:
            self._begin_anew()
        self._empty_above = not self._under_way

    # What vLLM's tiering manager asks.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._under_way.add(req_context.req_id)
        self._empty_above = False
        req_context.set_state(Request(adapter=self._adapter_of.pop(req_context.req_id, b"")))
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Answered from memory, and for good: a block that is still being written is a miss."""
        request = request_of(req_context)
        if key in request.failed or self._outdated:
            return LookupResult.MISS
        if not self._health.may_load:
            self._counts.count(ssd_metrics.LOOKUPS_OFF)
            if self.store.contains(key + request.adapter):
                self._health.known([key + request.adapter])
            return LookupResult.MISS
        return LookupResult.HIT if self._loadable(key, request) else LookupResult.MISS

    def submit_load(self, job_metadata: TierTransferJob) -> None:
        request = request_of(job_metadata.req_context)
        keys = list(job_metadata.keys)
        for key in keys:
            request.loads[key] = request.loads.get(key, 0) + 1
        ticket = job_metadata.job_id
        self._loads[ticket] = _Load(request, len(keys) * self.block_size_bytes, self.queued_load_bytes)
        targets = Rows(self._memory, job_metadata.chunk_ids.tolist())
        self.store.get(ticket, [key + request.adapter for key in keys], targets, self._ssd.load_deadline_s)

    def submit_store(self, job_metadata: TierTransferJob) -> None:
        if self._outdated:
            self._counts.count(ssd_metrics.REFUSED, len(job_metadata.keys), ssd_metrics.OUTDATED)
            self._done.append(TierJobResult(job_id=job_metadata.job_id, success=False))
            return
        request = request_of(job_metadata.req_context)
        blocks = self._missing(job_metadata, request)
        chosen = self._admission.choose(list(blocks), request.first_too, self._clock())
        wanted = {key: chunk for (key, chunk), wants in zip(blocks.items(), chosen, strict=True) if wants}
        if len(wanted) < len(blocks):
            request.first_too = False
            self._counts.count(ssd_metrics.REFUSED, len(blocks) - len(wanted), ssd_metrics.FIRST_TIME)
        request.stored.update(wanted)
        self._put(job_metadata.job_id, wanted)

    def get_finished_jobs(self) -> Iterable[TierJobResult]:
        self._take_finished()
        done, self._done = self._done, []
        return done

    def serve_external_requests(self, parent: Any) -> None:
        if self._outdated:
            # What host memory has may be of other weights than the store's blocks.
            self._late_offers.clear()
        self._late_offers.submit(parent, self._store_late)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """All blocks of a request are known now: they are in use, and were seen once more."""
        self._under_way.discard(req_context.req_id)
        request = request_of(req_context)
        keys = {key + request.adapter: key for key in req_context._offload_key_positions}
        again = self._admission.seen(list(keys))
        absent = [not self.store.contains(key) for key in keys]
        self.store.touch([key for key, missing in zip(keys, absent, strict=True) if not missing])
        worth = (
            key
            for stored, key, missing, twice in zip(keys, keys.values(), absent, again, strict=True)
            if missing and twice and stored not in request.stored
        )
        self._late_offers.add(worth, request.adapter)

    def on_schedule_end(self, context: Any) -> None:
        now = self._clock()
        self._look(now)
        self._health.try_again(self.store, now)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that came and went, a bounded number for each scheduler step."""
        self._take_changes()
        for removed, keys in ((True, self._went), (False, self._came)):
            if keys and self._tells and not self._outdated:
                plain = [without_version(key) for key in keys]
                yield OffloadingEvent(keys=plain, medium=self.medium, removed=removed, locality=self.locality)
        self._came, self._went = [], []

    def has_pending_work(self) -> bool:
        """Whether an idle engine steps on: to announce and show what was written, or found at start."""
        if self._late_offers:
            return True
        now = self._clock()
        self._look(now)
        if self._tells:
            self._take_changes()
        # vLLM takes the metrics in at the end of a step: what is written after the last one would never be shown.
        unsettled = self._seen.recovering or self._seen.staged_bytes > 0 or self._shown != _progress(self._seen)
        return bool(self._came or self._went) or (unsettled and now - self._progress_at < _SETTLE_S)

    def drain_jobs(self) -> None:
        """All jobs end, for a reset of vLLM's caches. A load that hangs ends as late and touches nothing any more."""
        self.store.drain(_DRAIN_S)

    def shutdown(self) -> None:
        self._close()
        self._memory.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return ssd_metrics.definitions()

    def get_stats(self) -> OffloadingConnectorStats:
        stats = self.store.stats()
        self._counts.snapshot(stats)
        self._shown = _progress(stats)
        self._counts.gauge(ssd_metrics.BUDGET, self._ssd.budget_bytes)
        self._health.show()
        return self._counts.take()

    def _loadable(self, key: bytes, request: Request) -> bool:
        return request.may_load(key, self._slots) and self.store.contains(key + request.adapter)

    def _missing(self, job: TierTransferJob, request: Request) -> dict[bytes, int]:
        """Chunks of a job that are not stored, by the store's key, in the order of the prompt."""
        position = job.req_context.get_offload_key_position
        blocks = sorted(zip(job.keys, job.chunk_ids, strict=True), key=lambda block: position(block[0]) or 0)
        return {
            key + request.adapter: int(chunk) for key, chunk in blocks if not self.store.contains(key + request.adapter)
        }

    def _store_late(self, job: TierTransferJob, adapter: bytes) -> None:
        blocks = self._missing(job, Request(adapter))
        self._admission.written(len(blocks), self._clock())
        self._put(job.job_id, blocks)

    def _begin_anew(self) -> None:
        """Leave the store and begin another one, for weights that no other server has: its folder ends with this one.

        What the disk holds stays there for the next start with the weights it is of.
        """
        logger.warning("vllm-pd: the SSD tier begins anew: the model's weights may have changed (%s).", self._outdated)
        self.store.drain(_DRAIN_S)
        self._take_finished()
        self._close()
        self._namespace = self._own_namespace.apart(os.urandom(32), self._outdated)
        try:
            self._place = open_place(self._ssd, self._namespace, self.block_size_bytes)
        except SettingsError as e:
            logger.error("vllm-pd: the SSD tier stays off: %s", e)
            return
        self._outdated, self._used = "", False
        self._counts.new_store()
        self._health.forget(str(self._place.folder))
        self._late_offers.clear()
        self._came, self._went = [], []

    def _put(self, ticket: int, blocks: dict[bytes, int]) -> None:
        if blocks:
            self._used = True
            self.store.put(ticket, list(blocks), Rows(self._memory, list(blocks.values())))
        else:
            self._done.append(TierJobResult(job_id=ticket, success=True))

    def _take_finished(self) -> None:
        now = self._clock()
        for ended in self.store.finished():
            if self._health.is_trial(ended.ticket):
                self._health.tried(ended, now)
            elif ended.is_load:
                self._done.append(self._loaded(ended, now))
            else:
                self._done.append(TierJobResult(job_id=ended.ticket, success=not ended.failed))

    def _loaded(self, ended: Finished, now: float) -> TierJobResult:
        load = self._loads.pop(ended.ticket)
        self._health.loaded(ended, now)
        if Reason.LATE in ended.failed.values():
            # One that was given up counts with the time that it was waited for.
            self._load_rate.observe(load.bytes, ended.seconds, load.queued)
        else:
            self._load_rate.observe(ended.bytes, ended.seconds, load.queued)
        load.request.failed.update(without_version(key) for key in ended.failed)
        return TierJobResult(
            job_id=ended.ticket,
            success=not ended.failed,
            successful_keys=tuple(without_version(key) for key in ended.ok) if ended.failed else None,
            transfer_time=ended.seconds,
            transfer_bytes=ended.bytes,
        )

    def _look(self, now: float) -> None:
        """Take a snapshot of the store, and note whether it gets on."""
        before, self._seen = self._seen, self.store.stats()
        if _progress(before) != _progress(self._seen):
            self._progress_at = now
        self._health.wrote(self._seen)

    def _take_changes(self) -> None:
        """See to it that the next `take_events` has something to tell, if there is anything."""
        # Of each block only the last change is told; that of a second look could contradict the first one's.
        if not self._came and not self._went:
            self._came, self._went = self.store.take_changes(_EVENTS_PER_STEP)
            self._health.known(self._came)

    def _close(self) -> None:
        self._place.close(_CLOSE_S)
        name = self._place.folder.name
        # It is still the former place where `_begin_anew` could not open another one.
        if name != self._own_namespace.name and self._place.folder.exists():
            try:
                check.clear(self._ssd.root, name)
            except SettingsError as e:
                logger.warning("vllm-pd: %s It is of no use any more, and goes when the SSD tier needs room.", e)


def _progress(stats: StoreStats) -> tuple[int, int, int]:
    """What changes while blocks are written, or found at the start."""
    return stats.written_blocks_total, stats.recovered_blocks_total, stats.staged_bytes
