"""The agent: keeps one worker registered and its caches in the block index, and has its prefill jobs done.

It has a thread of its own: vLLM's event loop only notes numbers here (`observe`), everything that waits happens in the
thread. The store may be away, at the start or later: the server serves all the same, and the agent registers when the
store is back. Nothing in here raises into vLLM.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Mapping

from vllm_pd.agent.agent_metrics import agent_metrics
from vllm_pd.agent.cache_feeds import CacheFeeds
from vllm_pd.agent.prefill_progress import EngineProgress
from vllm_pd.agent.prefill_runner import PrefillRunner, RunnerStats
from vllm_pd.agent.role_keeper import RoleKeeper
from vllm_pd.agent.role_move import Seen, differs
from vllm_pd.agent.spec import AgentSpec
from vllm_pd.errors import PDError, StoreError
from vllm_pd.layered import redact
from vllm_pd.state.base import HeartbeatResult, Registry, Role, RoleMove, TokenizerFiles, WorkerLoad
from vllm_pd.state.block_index import BlockIndex
from vllm_pd.state.codec import merge_loads
from vllm_pd.state.roles import Roles

logger = logging.getLogger("vllm.vllm_pd")
"""Below vLLM's own logger, whose handlers and level it shares."""

LOAD_PERIOD_S = 0.25
"""A changed load is published at most this often."""
BUSY_LOAD_PERIOD_S = 2.0
"""One that does not change is published this often while there are requests, for its time."""
_READY_PERIOD_S = 0.2
_BACKOFF_S = (0.25, 5.0)
_WITHDRAW_S = 1.5
# Long against a lease, short against the time after which nobody needs the files of a worker that is gone.
_TOKENIZER_TTL_MS = 3_600_000
_TOKENIZER_PERIOD_S = 900.0
_METRICS_PERIOD_S = 1.0
_JOIN_S = 0.02


class Agent:
    """Registers, renews and withdraws one worker, publishes its load, writes the block index of its caches, claims
    prefill jobs, and changes its role when that is wished.

    Args:
        spec: what to register.
        open_registry, open_index: make the registry and the block index; called in the agent's thread, so their
            connections belong to that loop.
        serves: answers whether the HTTP server of this process serves; the worker is registered once it does, so that
            a router never sees a worker that refuses connections.
        open_roles: makes the wishes for roles; None: the worker's role stays.
        note_move: told of each change of the role that has ended, instead of the metrics of this process.
    """

    def __init__(
        self,
        spec: AgentSpec,
        open_registry: Callable[[], Registry],
        open_index: Callable[[], BlockIndex],
        serves: Callable[[], Awaitable[bool]],
        open_roles: Callable[[], Roles] | None = None,
        note_move: Callable[[RoleMove], None] | None = None,
    ) -> None:
        self._spec = spec
        self._open_registry = open_registry
        self._open_index = open_index
        self._serves = serves
        self._open_roles = open_roles
        self._note_move = note_move or _note_move
        self._record = spec.record
        self._files: TokenizerFiles | None = None
        self._observed: dict[int, WorkerLoad] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._main, name="vllm-pd-agent", daemon=True)
        self._lost = False
        self._stale = False
        self._registered = False
        self._failures = 0
        self._next_beat = 0.0
        self._next_tokenizer = 0.0
        self._next_load = 0.0
        self._next_metrics = 0.0
        self._feeds: CacheFeeds | None = None
        self._progress = EngineProgress(known=spec.prefill is not None and spec.prefill.progress_known)
        self._runner: PrefillRunner | None = None
        self._keeper: RoleKeeper | None = None
        self._draining = False
        self._published: dict[int, tuple[int, int, float]] = {}

    def start(self) -> None:
        """Start the thread and return at once. Call it once."""
        self._thread.start()

    def observe(self, engine: int, running: int, waiting: int, kv_usage: float) -> None:
        """Note the newest load of an engine. No lock and no I/O: safe on a hot event loop."""
        self._observed[engine] = WorkerLoad(running, waiting, kv_usage, time.time_ns() // 1_000_000)
        self._progress.note(running)

    @property
    def role(self) -> Role:
        """What the worker does now."""
        return self._keeper.state.role if self._keeper is not None else self._record.role

    @property
    def prefill_stats(self) -> RunnerStats | None:
        """What it has done of the prefill queue; None when it takes nothing from it (yet)."""
        return self._runner.stats if self._runner is not None else None

    def stop(self, timeout_s: float = 2.0, *, wait_for_jobs: bool = False) -> bool:
        """Withdraw the worker and end the thread. Idempotent, callable from any thread.

        Args:
            wait_for_jobs: wait also for prefill jobs that are under way; else the thread ends after them.

        Returns:
            Whether that was done within `timeout_s`; if not, the lease makes routers forget the worker.
        """
        self._stop_requested.set()
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            try:
                loop.call_soon_threadsafe(stopping.set)
            except RuntimeError:
                # The loop has just closed: the thread is ending by itself.
                logger.debug("the agent had already ended")
        # A garbage collection in our own thread may finalise the engine client, which ends here.
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and self._thread is not threading.current_thread():
            if self._draining and not wait_for_jobs:
                return True
            if (left_s := deadline - time.monotonic()) <= 0:
                break
            self._thread.join(min(left_s, _JOIN_S))
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            asyncio.run(self.run())
        except PDError as e:
            logger.error("vllm-pd: this worker is not registered: %s", e)
        except Exception:
            # The thread is the last frame that can say so; vLLM goes on serving.
            logger.exception("vllm-pd: the agent ended unexpectedly; this worker will vanish from the routers")

    async def run(self) -> None:
        """What the thread does, for whoever has a loop to spare: use it instead of `start`.

        Ends after `stop`, once the worker is withdrawn; cancelled, it withdraws nothing.
        """
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # A stop that came before the two lines above could not wake us.
        if self._stop_requested.is_set():
            return
        while not await self._serves():
            if await self._sleep(_READY_PERIOD_S):
                return
        self._record = dataclasses.replace(self._record, startup_s=round(self._spec.age_s(), 1))
        registry = self._open_registry()
        prefill = self._spec.prefill if self._spec.is_registrar else None
        queue = prefill.open_queue() if prefill is not None else None
        roles = self._open_roles() if self._open_roles is not None and self._spec.is_registrar else None
        try:
            if roles is not None:
                self._keeper = RoleKeeper(self._record, roles, self._note_move)
            if prefill is not None and queue is not None:
                self._runner = PrefillRunner(self._record, prefill, queue, self._progress)
                self._runner.take(self._record.role.prefills)
                self._runner.start()
            if self._spec.is_registrar:
                self._feeds = CacheFeeds(self._record, self._open_index(), self._spec.event_sources, self._spec.lease_s)
                # Before anything that takes time: an engine keeps only so many of its last events.
                await self._feeds.match()
                self._read_tokenizer()
            while not await self._sleep(await self._cycle(registry)):
                pass
            if self._runner is not None:
                self._runner.leave()
            await self._withdraw(registry)
            if self._runner is not None and prefill is not None:
                self._draining = True
                await self._runner.drain(prefill.grace_s)
        finally:
            if self._runner is not None:
                await self._runner.close()
            if queue is not None:
                await queue.close()
            if roles is not None:
                await roles.close()
            await registry.close()
            if self._feeds is not None:
                await self._feeds.close()

    async def _cycle(self, registry: Registry) -> float:
        """Do what is due; return the seconds until something is due again."""
        try:
            if self._spec.is_registrar and time.monotonic() >= self._next_beat:
                await self._beat(registry)
            await self._publish_load(registry)
            self._show_metrics()
            if self._keeper is not None and self._registered and not self._stale:
                await self._mind_role(self._keeper, registry)
        except Exception as e:
            # Not only StoreError: an unforeseen error must cost one try, not this worker's registration.
            return self._on_lost(e)
        if self._lost:
            self._lost = False
            logger.info("vllm-pd: the store %s is back.", redact(self._spec.store))
        self._failures = 0
        # The load is looked at this often; asking is cheaper than having vLLM's loop wake this one.
        return LOAD_PERIOD_S

    async def _beat(self, registry: Registry) -> None:
        assert self._feeds is not None
        await self._feeds.match()
        await self._put_tokenizer(registry)
        result = await registry.heartbeat(self._record, self._spec.lease_ms)
        if result is HeartbeatResult.STALE:
            self._allow(False)
            self._on_stale()
            return
        self._registered = True
        self._allow(True)
        if self._keeper is not None:
            self._keeper.told()
        if result is HeartbeatResult.NEW:
            if self._keeper is not None:
                self._keeper.store_was_empty()
            # Also what a store says that came back empty: it needs the rest again, too.
            self._next_tokenizer = self._next_load = 0.0
            self._feeds.check()
            await self._put_tokenizer(registry)
            logger.info(
                "vllm-pd: registered %s as %s in pool %s.", self._record.url, self._record.role, self._record.pool.id
            )
        self._stale = False
        # Earlier by up to a fifth: workers that started together must not beat together for ever.
        self._next_beat = time.monotonic() + self._spec.lease_s / 3 * random.uniform(0.8, 1.0)

    async def _mind_role(self, keeper: RoleKeeper, registry: Registry) -> None:
        """Do what is wished of the worker's role, and let everybody know at once what has changed."""
        if await keeper.ask():
            # A store that has just lost everything has lost the wish, too: whether it has, a heartbeat tells.
            await self._beat(registry)
            if keeper.draining and not keeper.wish_may_be_lost:
                keeper.taken_back()
        self._take_role(keeper)
        changed = self._change_record(keeper)
        if keeper.draining and not changed:
            await self._drain(keeper, registry)
            changed = self._change_record(keeper)
        if changed:
            await self._beat(registry)

    async def _drain(self, keeper: RoleKeeper, registry: Registry) -> None:
        record = self._record
        if keeper.state.gives_jobs_away and self._runner is not None:
            # Again and again: routers that have not heard of it yet may put jobs there.
            await self._runner.give_away_waiting()
        # Its engines' reports may have come to another API server of this worker.
        state = await registry.find(record.id, record.pool.id)
        self._look_at_role(keeper, merge_loads([self._observed, state.loads if state is not None else {}]))

    def _look_at_role(self, keeper: RoleKeeper, loads: Mapping[int, WorkerLoad]) -> None:
        keeper.look(
            Seen(
                requests=sum(load.running + load.waiting for load in loads.values()),
                jobs=self._runner.jobs if self._runner is not None else 0,
                kv_usage=max((load.kv_usage for load in loads.values()), default=0.0),
            )
        )
        self._take_role(keeper)

    def _take_role(self, keeper: RoleKeeper) -> None:
        if self._runner is not None:
            self._runner.take(keeper.state.claims)

    def _change_record(self, keeper: RoleKeeper) -> bool:
        """Have the next heartbeat tell of the role; whether there is something that others should hear of at once."""
        before, self._record = self._record, keeper.write_into(self._record)
        return differs(before.move, self._record.move)

    def _allow(self, allowed: bool) -> None:
        """Whether the worker's place in the store is this process's."""
        if self._feeds is not None:
            self._feeds.allow(allowed)
        if self._runner is not None:
            self._runner.allow(allowed)

    async def _put_tokenizer(self, registry: Registry) -> None:
        if self._files is not None and time.monotonic() >= self._next_tokenizer:
            await registry.put_tokenizer(self._record.pool.id, self._files, _TOKENIZER_TTL_MS)
            self._next_tokenizer = time.monotonic() + _TOKENIZER_PERIOD_S

    async def _publish_load(self, registry: Registry) -> None:
        loads = dict(self._observed)
        seen = _without_time(loads)
        now = time.monotonic()
        if not loads or self._stale or (seen == self._published and now < self._next_load):
            return
        record = self._record
        await registry.publish_load(record.id, record.pool.id, self._spec.writer, loads, self._spec.lease_ms)
        self._published = seen
        # Routers take a busy engine whose report stands still for a stuck one.
        busy = any(load.running or load.waiting for load in loads.values())
        self._next_load = now + min(self._spec.lease_s / 3, BUSY_LOAD_PERIOD_S if busy else self._spec.lease_s)

    async def _withdraw(self, registry: Registry) -> None:
        if not self._registered:
            return
        try:
            async with asyncio.timeout(_WITHDRAW_S):
                await registry.withdraw(self._record.id, self._record.pool.id, self._record.epoch)
                if self._feeds is not None:
                    await self._feeds.remove()
        except (StoreError, TimeoutError) as e:
            logger.warning(
                "vllm-pd: this worker could not be withdrawn; routers forget it within %g s (%s)", self._spec.lease_s, e
            )
            return
        logger.info("vllm-pd: withdrew %s.", self._record.url)

    def _show_metrics(self) -> None:
        if time.monotonic() < self._next_metrics:
            return
        self._next_metrics = time.monotonic() + _METRICS_PERIOD_S
        if self._feeds is not None and self._feeds.feeds:
            agent_metrics().update(self._feeds.feeds)
        if self._runner is not None:
            agent_metrics().update_prefill(self._runner.budget, self._runner.stats)

    def _read_tokenizer(self) -> None:
        try:
            self._files = self._spec.load_tokenizer()
        except Exception:
            # Routers can still route by load, so an unreadable file must not keep the worker out.
            logger.warning("vllm-pd: the tokenizer files cannot be read, so they are not published", exc_info=True)
        if self._files is not None:
            self._record = dataclasses.replace(self._record, tokenizer=self._files.sha)

    def _on_lost(self, error: Exception) -> float:
        if not self._lost:
            self._lost = True
            logger.warning(
                "vllm-pd: the store is lost, trying again until it is back: %s",
                error,
                exc_info=not isinstance(error, StoreError),
            )
        # Whatever the store knew of this worker may have ended by the time it is back.
        self._next_beat = 0.0
        if self._keeper is not None and self._keeper.draining:
            self._look_at_role(self._keeper, dict(self._observed))
            self._change_record(self._keeper)
        first, cap = _BACKOFF_S
        pause = min(cap, self._spec.lease_s / 2, first * 2.0 ** min(self._failures, 10))
        self._failures += 1
        return pause * random.uniform(0.5, 1.0)

    def _on_stale(self) -> None:
        if not self._stale:
            logger.error(
                "vllm-pd: another process with a newer start is registered under %s, so this one stays out; stop one "
                "of them, or give each its own --port or --pd-advertise-url.",
                self._record.url,
            )
        self._stale = True
        # Slowly: the other one may end, and then this one takes over.
        self._next_beat = time.monotonic() + self._spec.lease_s

    async def _sleep(self, seconds: float) -> bool:
        """Wait, but no longer than until `stop`; return whether it was called."""
        assert self._stopping is not None
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True


def _note_move(move: RoleMove) -> None:
    agent_metrics().note_move(move)


def _without_time(loads: Mapping[int, WorkerLoad]) -> dict[int, tuple[int, int, float]]:
    # The usage is compared as it is: it changes with the number of blocks in use, which is what a router wants.
    return {engine: (load.running, load.waiting, load.kv_usage) for engine, load in loads.items()}
