"""One running router: its parts put together, with three phases `start`, serving, `stop`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vllm_pd.background import end_tasks
from vllm_pd.errors import SettingsError
from vllm_pd.layered import redact
from vllm_pd.planner.service import PlannerService
from vllm_pd.planner.settings import PlannerSettings
from vllm_pd.router.aiohttp_client import AiohttpUpstream, tls_context
from vllm_pd.router.aiohttp_server import AiohttpServer
from vllm_pd.router.announcements import Announcements
from vllm_pd.router.call import CallReader
from vllm_pd.router.continuation import Continuation
from vllm_pd.router.decode_leg import DecodeLeg
from vllm_pd.router.demand_report import INTERVAL_S as DEMAND_INTERVAL_S
from vllm_pd.router.demand_report import DemandMeter, DemandPublisher
from vllm_pd.router.directory import Directory
from vllm_pd.router.drain import Drain
from vllm_pd.router.endpoints import Endpoints
from vllm_pd.router.give_up import GiveUps
from vllm_pd.router.health import HealthWatch
from vllm_pd.router.index_metrics import IndexCollector
from vllm_pd.router.index_watch import IndexWatch
from vllm_pd.router.inflight import INTERVAL_S as INFLIGHT_INTERVAL_S
from vllm_pd.router.inflight import InflightPublisher
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.model_folder import read_tokenizer_files
from vllm_pd.router.placement import Placer
from vllm_pd.router.prefill_leg import DirectPrefill, PrefillDispatch, Way
from vllm_pd.router.prompt_blocks import PromptHasher
from vllm_pd.router.prompt_reading import PromptReader
from vllm_pd.router.proxy import Proxy
from vllm_pd.router.queue_metrics import DispatchMetrics, QueueCollector
from vllm_pd.router.queue_watch import INTERVAL_S as QUEUE_INTERVAL_S
from vllm_pd.router.queue_watch import QueueWatch
from vllm_pd.router.queued_prefill import QueuedPrefill
from vllm_pd.router.readiness import Readiness
from vllm_pd.router.relay import Relay
from vllm_pd.router.release import Releases
from vllm_pd.router.repeat import repeat
from vllm_pd.router.retry_budget import RetryBudget
from vllm_pd.router.roles_endpoint import RolesEndpoint
from vllm_pd.router.self_check import SelfCheck
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.static_probe import StaticProbe
from vllm_pd.router.store_watch import StoreWatch
from vllm_pd.router.tokenizer_cache import TokenizerCache
from vllm_pd.router.tokenizer_metrics import TokenizerCollector
from vllm_pd.router.transport import HttpServer, RouterStopping, Upstream
from vllm_pd.router.watched_legs import Legs
from vllm_pd.router.worker import Worker
from vllm_pd.state.base import Registry
from vllm_pd.state.block_index import BlockIndex
from vllm_pd.state.demand import DemandBoard
from vllm_pd.state.open_registry import open_block_index, open_demand, open_prefill_queue, open_registry, open_roles
from vllm_pd.state.prefill_queue import PrefillQueue
from vllm_pd.state.roles import Roles

STORE_INTERVAL_S = 0.5
STORE_TIMEOUT_S = 1.0
PROBE_FACTOR = 4
CHECK_INTERVAL_S = 0.5
CLOSE_DEADLINE_S = 5.0
CUT_S = 1.0
"""For requests that are cut to send their last words."""

_log = logging.getLogger(__name__)


class RouterService:
    """Make it anywhere; call its methods inside one event loop.

    Args:
        registry, index, queue, roles, demand: instead of those behind `settings.store`.
        planner: settings of a planner that is to run in this process; None for none.
        clock: monotonic seconds.
        refresh_s: seconds between two looks at the store, 0.5 if None; between two at static workers four times that.

    Raises:
        SettingsError: the store URL or the CA file is unusable.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        registry: Registry | None = None,
        index: BlockIndex | None = None,
        queue: PrefillQueue | None = None,
        roles: Roles | None = None,
        demand: DemandBoard | None = None,
        planner: PlannerSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        refresh_s: float | None = None,
    ) -> None:
        self._settings = settings
        self._refresh_s = refresh_s or STORE_INTERVAL_S
        if registry is None and settings.store:
            registry = open_registry(settings.store, settings.namespace, timeout_s=STORE_TIMEOUT_S)
            index = open_block_index(settings.store, settings.namespace, timeout_s=STORE_TIMEOUT_S)
            queue = open_prefill_queue(settings.store, settings.namespace, timeout_s=STORE_TIMEOUT_S)
            roles = open_roles(settings.store, settings.namespace, timeout_s=STORE_TIMEOUT_S)
            demand = open_demand(settings.store, settings.namespace, timeout_s=STORE_TIMEOUT_S)
        self._registry = registry
        self._roles = roles
        self._demand = demand
        self._planner_settings = planner
        self.planner: PlannerService | None = None
        """The one in this process, once started."""
        self.meter = DemandMeter()
        self._index = index if settings.index else None
        self._queue = queue if settings.prefill_dispatch == Way.QUEUE else None
        try:
            self._tls = tls_context(settings.worker_ca, settings.worker_insecure)
        except OSError as e:  # ssl.SSLError is one
            raise SettingsError(
                f"The CA file {settings.worker_ca} cannot be used ({e.strerror or e}); give a PEM file in --worker-ca."
            ) from None
        self._clock = clock
        self._id = secrets.token_hex(8)
        self.directory = Directory(clock, store_configured=registry is not None, router=self._id)
        self.metrics = RouterMetrics(self.directory)
        override = read_tokenizer_files(Path(settings.tokenizer)) if settings.tokenizer else None
        self._tokenizers = TokenizerCache(registry, clock, override)
        self.metrics.registry.register(TokenizerCollector(self._tokenizers))
        self.watch: IndexWatch | None = None
        self._announcements: Announcements | None = None
        self._prompts: PromptReader | None = None
        self._legs = Legs(clock)
        self._drain = Drain()
        self._upstream: Upstream | None = None
        self._give_ups: GiveUps | None = None
        self._releases: Releases | None = None
        self.queues: QueueWatch | None = None
        self._server: HttpServer | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self.port = 0
        """The bound port, once started."""

    async def start(self) -> None:
        """Listen, and begin to look for workers. Does not wait for the store or for any worker.

        Raises:
            OSError: the address cannot be bound.
            SettingsError: the planner's settings cannot be used.
        """
        settings = self._settings
        if self._planner_settings is not None:
            # First, as its settings may be wrong.
            self.planner = PlannerService(self._planner_settings, registry=self.metrics.registry)
        upstream = AiohttpUpstream(connect_timeout=settings.connect_timeout, tls=self._tls)
        self._upstream = upstream
        check: SelfCheck | None = None
        if self._index is not None:
            self.watch = watch = IndexWatch(self._index, self.directory, self._clock)
            self._announcements = Announcements(watch.holds, watch.seq, self._clock)
            check = SelfCheck(
                upstream,
                worker_key=settings.worker_api_key,
                hasher=self._hasher,
                announcements=self._announcements,
                clock=self._clock,
            )
            self.metrics.registry.register(IndexCollector(watch, check))
        self._prompts = PromptReader(self._tokenizers, self.metrics, index=self.watch, check=check)
        placer = Placer(settings, self.metrics, index=self.watch, announcements=self._announcements, clock=self._clock)
        calls = CallReader(settings, self.directory, self._prompts)
        legs = self._legs
        budget = RetryBudget(settings.retry_ratio, settings.retry_floor, self._clock)
        continuation = Continuation(settings, self.directory, upstream, self._prompts, budget, self.metrics)
        relay = Relay(settings, self.metrics, continuation.may_leave)
        give_ups = self._give_ups = GiveUps(upstream, self.metrics, worker_key=settings.worker_api_key)
        decode = DecodeLeg(settings, self.directory, upstream, placer, relay, legs, budget, give_ups, self.metrics)
        releases = self._releases = Releases(upstream, self.metrics, worker_key=settings.worker_api_key)
        dispatch: PrefillDispatch = DirectPrefill(settings, self.directory, upstream, placer, releases, legs)
        dispatched = DispatchMetrics(self.metrics.registry)
        if self._queue is not None:
            queues = self.queues = QueueWatch(self._queue, self.directory, releases, legs, self._id, self._clock)
            dispatch = QueuedPrefill(settings, self.directory, placer, queues, dispatch, dispatched)
            self.metrics.registry.register(QueueCollector(lambda: queues.pools))
        proxy = Proxy(
            settings,
            releases,
            dispatched,
            self.directory,
            calls,
            placer,
            dispatch,
            decode,
            continuation,
            self.metrics,
            self.meter,
        )
        readiness = Readiness(
            self.directory,
            None if settings.serve_before_index else self.watch,
            lambda: self._tokenizers.loading,
            self._clock,
            require_prefill=settings.require_prefill,
        )
        endpoints = Endpoints(
            settings,
            self.directory,
            upstream,
            proxy,
            calls,
            placer,
            readiness,
            self._drain,
            self.metrics,
            self._clock,
            RolesEndpoint(settings, self.directory, self._registry, self._roles),
        )
        server = AiohttpServer(
            endpoints,
            host=settings.host,
            port=settings.port,
            idle=settings.idle_timeout,
            grace=CUT_S,
        )
        try:
            self.port = await server.start()
        except OSError:
            await self.stop()
            raise
        self._server = server
        health = HealthWatch(settings, self.directory, legs, upstream, self.metrics, self._clock)
        self._watchers.append(asyncio.create_task(health.run()))
        if self._registry is not None:
            store = StoreWatch(
                self._registry, self.directory, self._tokenizers, index=self.watch, interval=self._refresh_s
            )
            publisher = InflightPublisher(self._registry, self.directory, self._id, self._clock)
            self._watchers.append(asyncio.create_task(store.run()))
            self._watchers.append(asyncio.create_task(repeat(publisher.refresh, INFLIGHT_INTERVAL_S)))
        if self._demand is not None:
            told = DemandPublisher(self._demand, self.directory, self.meter, self._id)
            self._watchers.append(asyncio.create_task(repeat(told.refresh, DEMAND_INTERVAL_S)))
        if self.planner is not None:
            self.planner.start()
        if self.queues is not None:
            interval = min(self._refresh_s, QUEUE_INTERVAL_S)
            self._watchers.append(asyncio.create_task(repeat(self.queues.refresh, interval)))
        if check is not None:
            self._watchers.append(asyncio.create_task(repeat(partial(self._check, check), CHECK_INTERVAL_S)))
        if settings.workers:
            probe = StaticProbe(
                settings.workers,
                upstream,
                self.directory,
                worker_key=settings.worker_api_key,
                interval=self._refresh_s * PROBE_FACTOR,
            )
            self._watchers.append(asyncio.create_task(probe.run()))
        for watcher in self._watchers:
            watcher.add_done_callback(_report_crash)
        _log.info(
            "router listens on %s:%d, store %s, namespace %s",
            settings.host,
            self.port,
            redact(settings.store).partition("?")[0] or "none",
            settings.namespace,
        )

    async def stop(self) -> None:
        """Begin no new requests, let those in progress finish within the grace time, close everything. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            if not await self._drain.finish(self._settings.shutdown_grace):
                self._legs.stop(RouterStopping("the router is being stopped"))
                for queue in self.queues.pools if self.queues is not None else ():
                    queue.jobs.lose()
                await self._drain.finish(CUT_S)
            await server.stop()
        planner, self.planner = self.planner, None
        if planner is not None:
            await planner.stop()
        watchers, self._watchers = self._watchers, []
        await end_tasks(watchers)
        for background in (self.watch, self.queues, self._give_ups, self._releases):
            if background is not None:
                await background.close()
        if self._prompts is not None:
            self._prompts.close()
        await self._tokenizers.close()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            await upstream.close()
        opened = (self._registry, self._index, self._queue, self._roles, self._demand)
        stores = [store for store in opened if store is not None]
        self._registry = self._index = self._queue = self._roles = self._demand = None
        for store in stores:
            try:
                async with asyncio.timeout(CLOSE_DEADLINE_S):
                    await store.close()
            except TimeoutError:
                _log.debug("the store did not close its connections in time")

    def _hasher(self, worker: Worker) -> PromptHasher | None:
        """What hashes prompts for `worker`; None while its tokenizer is not there."""
        record = worker.record
        if self._tokenizers.get(worker.pool, record.tokenizer) is None:
            return None
        return self._tokenizers.hasher(record.pool, worker.pool, record.tokenizer)

    async def _check(self, check: SelfCheck) -> None:
        watch = self.watch
        if watch is not None:
            await check.refresh([workers for workers in self.directory.pools if watch.follows(workers[0].pool)])


def _report_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a background task ended, the list of workers is frozen", exc_info=error)
