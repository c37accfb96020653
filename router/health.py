"""Watches the workers that this router waits for, and looks at those that are in trouble.

- A worker from which nothing has come for a second, though something is waited for, is asked for `/health`. Without any
  sign of life for `--health-timeout` it is down: a stopped process takes connections and never answers.
- A worker that takes no connections may be finishing what it has, or have lost its engine and hold connections on which
  nothing will come (vLLM without a time to drain). It is down after `--stuck-timeout` without a byte of any answer, or
  `--down-timeout` where none has begun.
- A living process may hold an engine that computes nothing: its load report stands still while requests are on it
  (`--stuck-timeout`; an engine at a long prefill reports its steps).
- An engine that has fewer requests than this router has sent there: some were lost on their way. So were those on a
  connection that looks well on this side only; where the other host is gone, TCP's keep-alive finds that out.
Legs on such workers are ended with `WorkerDown` as soon as another worker can take them. Others wait, as the worker may
come back, for `--down-timeout` at most.
- A leg on another worker that reads KV from a stopped process, and has no first byte, is ended with `SourceDown` and
  computed anew, on the same worker if need be: such a read cannot be ended and lasts as long as the process is stopped.
- A worker whose breaker is open is asked for `/health` until it answers (`router.breaker`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from vllm_pd.background import end_tasks
from vllm_pd.router.breaker import Breaker, Circuit, Trouble
from vllm_pd.router.directory import Directory
from vllm_pd.router.headers import to_worker
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.repeat import repeat
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.signs_of_life import LegView, lost_legs, missing, silence, stuck_after
from vllm_pd.router.transport import (
    ConnectFailed,
    ConnectTimeout,
    SourceDown,
    Upstream,
    UpstreamError,
    WorkerDown,
)
from vllm_pd.router.watched_legs import Leg, Legs
from vllm_pd.router.worker import Worker

LOOK_S = 0.25
SUSPECT_S = 1.0
"""Silence after which a worker is asked for its health."""
PROBE_S = 2.0
"""For an answer to `/health`."""
LATE_S = 1.0
"""If this task comes so much too late, this process was stopped or overloaded: nothing that it missed is held against a
worker."""
MAX_ANSWER = 64 * 1024
SOURCE_DOWN = "source_down"
"""As a metric's label."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Seen:
    """What is known of one worker beside its legs."""

    sign: float = 0.0
    """When its process gave the last sign of life that was not a byte of an answer."""
    missed: int = 0
    """Looks in a row that it did not answer."""
    probe: asyncio.Task[None] | None = None
    refuses: bool = False
    """It takes no connections."""
    short_since: dict[int, float] = field(default_factory=dict)
    """Rank -> since when its engine has had fewer requests than were sent there."""


class HealthWatch:
    """One background task. Belongs to one event loop.

    Args:
        clock: monotonic seconds, the loop's and the directory's.
    """

    def __init__(
        self,
        settings: RouterSettings,
        directory: Directory,
        legs: Legs,
        upstream: Upstream,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._legs = legs
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._timeout = settings.health_timeout
        self._stuck = settings.stuck_timeout
        self._patience = settings.down_timeout
        self._suspect = min(SUSPECT_S, self._timeout / 5)
        self._probe_s = min(PROBE_S, 2 * self._timeout / 5)
        self._headers = to_worker([], worker_key=settings.worker_api_key, request_id=None)
        self._seen: dict[Worker, _Seen] = {}
        self._last = clock()
        self._base = self._last
        """Nothing before counts as silence."""
        self._store_base = self._last
        """The same for load reports, which come through the store."""

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await repeat(self.look, min(LOOK_S, self._timeout / 10))
        finally:
            await end_tasks([seen.probe for seen in self._seen.values() if seen.probe is not None])

    async def look(self) -> None:
        """Look at every worker that matters once. Never waits."""
        now = self._clock()
        if now - self._last > LOOK_S + LATE_S:
            self._base = now
        self._last = now
        if not self._directory.store.up:
            self._store_base = now
        broken = [worker for worker in self._directory.workers if worker.breaker.circuit is Circuit.OPEN]
        waited_for = self._legs.by_worker
        asked = [worker for worker, seen in self._seen.items() if seen.probe is not None]
        self._seen = {worker: self._seen.get(worker) or _Seen() for worker in {*broken, *waited_for, *asked}}
        for worker, legs in list(waited_for.items()):
            self._look_at(worker, self._seen[worker], list(legs), now)
        for worker in broken:
            if now >= worker.breaker.retry_at:
                self._probe(worker, self._seen[worker])

    def _look_at(self, worker: Worker, seen: _Seen, legs: Sequence[Leg], now: float) -> None:
        reported = max((report.seen for report in worker.reports.values()), default=0.0)
        silent = silence(now, _views(legs), max(seen.sign, reported, self._base))
        limit, also = self._timeout, "not even from /health"
        if seen.refuses:
            limit, also = (
                self._stuck if any(leg.begun for leg in legs) else self._patience,
                "and it takes no connections",
            )
        if silent < self._suspect:
            seen.missed = 0
        elif silent < limit or not (seen.missed or seen.refuses):
            self._probe(worker, seen)
        elif worker.breaker.trouble is not Trouble.DOWN:
            self._directory.note_down(worker, f"nothing has come from it for {silent:.0f} s, {also}")
        if self._directory.is_current(worker):
            for rank in worker.reports:
                self._look_at_engine(worker, seen, rank, [leg for leg in legs if leg.rank == rank], now)
        breaker = worker.breaker
        if breaker.circuit is not Circuit.OPEN or breaker.trouble not in (Trouble.DOWN, Trouble.STUCK):
            return
        heard = max((leg.wait.since for leg in legs if leg.begun), default=0.0)
        if max(reported, heard) > breaker.since:
            self._directory.note_alive(worker)
        else:
            self._move(worker, legs, now)

    def _look_at_engine(self, worker: Worker, seen: _Seen, rank: int, legs: Sequence[Leg], now: float) -> None:
        report, views = worker.reports[rank], _views(legs)
        limit = self._stuck_after(worker, rank)
        base = max(self._base, self._store_base)
        if report.requests and (still := silence(now, views, max(report.seen, base))) >= limit:
            self._directory.note_stuck(worker, f"its engine has requests and has made no step for {still:.0f} s")
        short = missing(now, views, report)
        if not short:
            seen.short_since.pop(rank, None)
        elif now - max(seen.short_since.setdefault(rank, now), base) >= limit:
            for i in lost_legs(now, views, report, limit)[:short]:
                self._give_up(legs[i], now, limit)

    def _give_up(self, leg: Leg, now: float, limit: float) -> None:
        """The engine does not have what `leg` waits for."""
        silent = now - leg.wait.since
        if leg.wait.error is None and (leg.movable() or silent >= limit + self._patience):
            self._directory.note_failed(leg.worker, "a request got lost on its way to the engine")
            self._end(leg, "lost", f"nothing came for {silent:.0f} s, and its engine has no such request")

    def _stuck_after(self, worker: Worker, rank: int) -> float:
        predicted = 0.0
        if rank < len(worker.engines):
            engine = worker.engines[rank]
            predicted = engine.rates.prefill(engine.own_prefill_tokens, 0)
        return stuck_after(self._stuck, predicted)

    def _move(self, worker: Worker, legs: Iterable[Leg], now: float) -> None:
        """End the legs that somebody else can take, and all that have waited too long."""
        breaker = worker.breaker
        hopeless = now - breaker.since >= self._patience
        for leg in legs:
            since = leg.wait.since
            if leg.reads:
                self._move_reader(leg, breaker)
                continue
            # Engines of other ranks may compute.
            if not since or (breaker.trouble is Trouble.STUCK and now - since < self._timeout):
                continue
            if (hopeless and now - since >= self._timeout) or leg.movable():
                self._end(leg, breaker.trouble.name.lower(), f"it {breaker.trouble}: {breaker.cause}")

    def _move_reader(self, leg: Leg, breaker: Breaker) -> None:
        """End a leg that waits for KV of a stopped process. Behind a stuck engine the memory can still be read."""
        waits = leg.wait.since and leg.wait.error is None
        if waits and breaker.trouble is Trouble.DOWN and leg.movable():
            self._metrics.legs_ended.labels(SOURCE_DOWN).inc()
            leg.wait.end(SourceDown(f"{leg.worker.id} {breaker.trouble}: {breaker.cause}"))

    def _end(self, leg: Leg, reason: str, cause: str) -> None:
        if leg.wait.error is None:
            self._metrics.legs_ended.labels(reason).inc()
            leg.wait.end(WorkerDown(cause))

    # Asking.

    def _probe(self, worker: Worker, seen: _Seen) -> None:
        if seen.probe is None:
            seen.probe = asyncio.create_task(self._ask(worker, seen))

    async def _ask(self, worker: Worker, seen: _Seen) -> None:
        directory = self._directory
        try:
            status = await self._health(worker)
        except ConnectTimeout as e:
            self._missed(worker, seen, str(e))
        except ConnectFailed as e:
            seen.refuses, seen.missed = True, 0
            if worker.breaker.trouble is Trouble.DOWN:
                directory.note_down(worker, str(e))
            else:
                directory.note_failure(worker, str(e))
        except UpstreamError as e:
            self._missed(worker, seen, str(e))
        except Exception:
            _log.exception("looking at the health of worker %s failed", worker.id)
        else:
            seen.sign, seen.missed, seen.refuses = self._clock(), 0, False
            if status >= 500:
                # Not what requests say by 503: vLLM's engine is dead.
                directory.note_down(worker, f"/health answers with status {status}")
            else:
                directory.note_alive(worker)
        finally:
            seen.probe = None

    def _missed(self, worker: Worker, seen: _Seen, cause: str) -> None:
        seen.missed += 1
        if worker.breaker.circuit is Circuit.OPEN:
            self._directory.note_down(worker, f"/health: {cause}")
        else:
            # It may be down; until that is sure, new requests go to others.
            self._directory.note_late(worker)

    async def _health(self, worker: Worker) -> int:
        answer = await self._upstream.open("GET", worker.url, "/health", self._headers, None, self._probe_s)
        try:
            await answer.read(MAX_ANSWER, self._probe_s)
            return answer.status
        finally:
            answer.close()


def _views(legs: Iterable[Leg]) -> list[LegView]:
    return [LegView(leg.sent, leg.wait.since, leg.begun) for leg in legs]
