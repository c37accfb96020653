"""The workers this router knows, in memory. Requests read it; the store watch and the static probe write it.

It has no I/O and no clock of its own. Losing the store changes nothing here: workers stay until a snapshot without
them arrives, and one in trouble is left out until it is well (`router.breaker`).

A lease that ended is a suspicion, not a death: a machine that stood still for some seconds ends the leases of workers
that are well. When nothing else decodes, those that left lately are tried until they refuse a connection; without this
a store that dies just then would leave the router without a worker for as long as it is away.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_pd.router.breaker import CLOSED, Breaker, Circuit, Sign, sign_of
from vllm_pd.router.transport import Headers, retry_after
from vllm_pd.router.worker import Source, Worker
from vllm_pd.routing.rates import RateLearner
from vllm_pd.routing.speed import Rates
from vllm_pd.state.base import PoolId, Role, WorkerId, WorkerState

LATE_PAUSE_S = 2.0
LAST_RESORT_S = 60.0
"""How long a worker that left is remembered while the store answers: later its address may be somebody else's."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """How the store fares.

    Attributes:
        configured: whether there is one at all.
        up: whether the last refresh worked.
        problem: why not, or "" if it did or has not been tried.
    """

    configured: bool
    up: bool = False
    problem: str = ""


class Directory:
    """All known workers. Belongs to one event loop.

    Args:
        clock: monotonic seconds.
        router: id under which this router publishes its own work.
    """

    def __init__(self, clock: Callable[[], float], *, store_configured: bool, router: str = "") -> None:
        self.store = StoreStatus(store_configured)
        self.generation = 0
        """Grows when a worker joins, leaves or starts anew."""
        self._clock = clock
        self._router = router
        self._workers: dict[WorkerId, Worker] = {}
        self._pools: dict[PoolId, tuple[Worker, ...]] = {}
        self._keep_until: dict[WorkerId, float] = {}
        self._departed: dict[WorkerId, tuple[Worker, float]] = {}
        """Workers that decode and are gone from the store, each with the time when that was seen."""
        self._learners: dict[PoolId, RateLearner] = {}
        self._serving: dict[str | None, Sequence[Worker]] = {}
        """Model -> what `serving` has found, as long as nothing changes. Only while none of them is in trouble: such
        answers depend on the time."""

    # What requests read.

    @property
    def workers(self) -> Sequence[Worker]:
        """Every known worker, ordered by id."""
        return [self._workers[key] for key in sorted(self._workers)]

    def get(self, worker: WorkerId) -> Worker | None:
        """The worker of that id, if it is known."""
        return self._workers.get(worker)

    @property
    def pools(self) -> Sequence[tuple[Worker, ...]]:
        """The workers by pool."""
        return list(self._pools.values())

    @property
    def models(self) -> list[str]:
        """Every name some worker answers to, sorted."""
        return sorted({name for worker in self._workers.values() for name in worker.record.models})

    def serving(self, model: str | None) -> Sequence[Worker] | None:
        """The workers that may get a request for `model`, or None if it is unknown here.

        Those that name the model get it. With one pool everything else goes there too: adapters loaded at run time are
        known to its workers only. Workers in trouble and departed ones are a last resort.
        """
        known = self._serving.get(model)
        if known is not None:
            return known
        one_pool = len(self._pools) <= 1
        found = [worker for worker in self._workers.values() if model in worker.record.models]
        is_named = bool(found)
        if one_pool and not any(worker.role.decodes for worker in found):
            found = list(self._workers.values())
        if self._departed and not any(worker.role.decodes for worker in found):
            everybody = [*self._workers.values(), *(worker for worker, _ in self._departed.values())]
            one_pool = len({worker.pool for worker in everybody}) <= 1
            found = [worker for worker in everybody if one_pool or model in worker.record.models]
        if not found and not one_pool:
            return None
        usable = self._usable(found)
        # Clients can think of names without end.
        if is_named and all(worker.breaker is CLOSED for worker in found):
            self._serving[model] = usable
        return usable

    def _usable(self, workers: Iterable[Worker]) -> list[Worker]:
        """Without those in trouble, unless then nothing could decode: a failed attempt beats a refusal on suspicion.

        Of those in trouble the ones that are only too busy come first, also before one that is about to do something
        else.
        """
        now = self._clock()
        known = list(workers)
        usable = [worker for worker in known if worker.is_usable(now)]
        if len(usable) < len(known) and not any(worker.decodes for worker in usable):
            decoders = [worker for worker in known if worker.role.decodes and not worker.is_usable(now)]
            busy = [worker for worker in decoders if not worker.is_broken]
            if any(worker.role.decodes for worker in usable):
                usable += [worker for worker in busy if worker.decodes]
            else:
                usable += busy or decoders
        return usable

    def is_current(self, worker: Worker) -> bool:
        """Whether what `worker` says of its load is up to date: it was in the store's newest list."""
        return (
            self.store.up
            and worker.source is Source.STORE
            and self._workers.get(worker.id) is worker
            and worker.id not in self._keep_until
        )

    def missing(self) -> str:
        """Why no request could be served now, in one sentence; "" when one could."""
        alive = [worker for worker in self._workers.values() if not worker.is_broken]
        if not self.store.up:
            # Nobody can come back to a store that is away: those that left just before may be well.
            alive += [worker for worker, _ in self._departed.values()]
        if any(worker.role.decodes for worker in alive):
            return ""
        broken = [worker for worker in self.workers if worker.role.decodes]
        if broken:
            listed = "; ".join(f"{worker.id} {worker.breaker.trouble}: {worker.breaker.cause}" for worker in broken)
            return f"Every worker that decodes is in trouble ({listed}); check those processes."
        if self._workers:
            return (
                f"No worker that decodes is alive, only {len(self._workers)} for prefill; "
                "start one with --role decode or --role both."
            )
        if self.store.configured and not self.store.up:
            return f"No worker is known and the store does not answer ({self.store.problem or 'not asked yet'})."
        return "No worker is alive; start one with `vllm serve MODEL --kv-connector pd --role both --pd-store URL`."

    # What became of requests, and of looks at a worker's health.

    def note_answer(self, worker: Worker, status: int, headers: Headers) -> None:
        """`worker` has answered with this status."""
        sign = sign_of(status)
        if sign is Sign.FINE and worker.breaker is CLOSED:
            return
        now = self._clock()
        if sign is Sign.FINE:
            self._set(worker, worker.breaker.fine(now))
        elif sign is Sign.BUSY:
            self._set(worker, worker.breaker.busy(now, retry_after(headers)))
        else:
            self._set(worker, worker.breaker.failed(now, f"status {status}"))

    def note_sent(self, worker: Worker) -> None:
        """A request goes to `worker`."""
        if worker.breaker is not CLOSED:
            worker.breaker = worker.breaker.sent(self._clock())

    def note_failed(self, worker: Worker, cause: str) -> None:
        """`worker` took a request and did not answer it: it broke off, or took too long."""
        self._set(worker, worker.breaker.failed(self._clock(), cause))

    def note_failure(self, worker: Worker, cause: str) -> None:
        """`worker` took no connection. One that had left is forgotten."""
        if self._departed.pop(worker.id, None) is not None:
            self._serving.clear()
            _log.info("worker %s had left, and takes no connections: %s", worker.id, cause)
            return
        self._set(worker, worker.breaker.refused(self._clock(), cause))

    def note_late(self, worker: Worker) -> None:
        """`worker` did not answer a question about its health in time: it is spared, no more."""
        self._set(worker, worker.breaker.busy(self._clock(), LATE_PAUSE_S))

    def note_down(self, worker: Worker, cause: str) -> None:
        """`worker` was found to give no sign of life."""
        self._set(worker, worker.breaker.down(self._clock(), cause))

    def note_stuck(self, worker: Worker, cause: str) -> None:
        """`worker` answers, and its engine was found to compute nothing."""
        self._set(worker, worker.breaker.stuck(self._clock(), cause))

    def note_alive(self, worker: Worker) -> None:
        """The process of `worker` gives a sign of life."""
        self._set(worker, worker.breaker.alive())

    def _set(self, worker: Worker, breaker: Breaker) -> None:
        before = worker.breaker
        worker.breaker = breaker
        self._serving.clear()
        if breaker.circuit is before.circuit:
            return
        if breaker.circuit is Circuit.OPEN:
            _log.warning("worker %s %s: %s", worker.id, breaker.trouble, breaker.cause)
        elif breaker.circuit is Circuit.CLOSED:
            _log.info("worker %s is well again", worker.id)

    # What the watchers write.

    def replace(self, source: Source, states: Iterable[WorkerState], *, after_outage: bool = False) -> None:
        """Take over the full list of one source.

        A worker missing from it is gone at once, except when the store may have forgotten it: after an outage, or when
        all are gone in one step, it keeps its place for what was left of its lease when last seen. A store that
        restarted empty is whole again within that time.
        """
        now = self._clock()
        fresh = {state.record.id: state for state in states}
        mine = {key: worker for key, worker in self._workers.items() if worker.source is source}
        suspicious = source is Source.STORE and (after_outage or not fresh)
        for key, worker in mine.items():
            if key in fresh:
                self._keep_until.pop(key, None)
            elif suspicious or key in self._keep_until:
                keep = self._keep_until.setdefault(key, now + worker.lease_span)
                if now >= keep:
                    self._remove(worker)
            else:
                self._remove(worker)
        for key, state in fresh.items():
            known = self._workers.get(key)
            if known is None and (departed := self._departed.pop(key, None)) is not None:
                known = self._workers[key] = departed[0]
                known.source = source
                self.generation += 1
                _log.info("worker %s is back", key)
            if known is None:
                self._workers[key] = Worker(state, source, self._learner(state.record.pool.id), self._router, now)
                self.generation += 1
                _log.info("worker %s joined: %s of %s", key, state.record.role, state.record.pool.model)
            elif known.source is source or source is Source.STORE:
                # A worker that is also named statically says more about itself through the store.
                if known.source is not source or known.record.epoch != state.record.epoch:
                    self.generation += 1
                known.source = source
                self._update(known, state, now)
        if source is Source.STORE:
            # While the store was away nobody could come back.
            self._departed = {
                key: (worker, now if after_outage else left)
                for key, (worker, left) in self._departed.items()
                if after_outage or now - left < LAST_RESORT_S
            }
        self._index()

    def _update(self, worker: Worker, state: WorkerState, now: float) -> None:
        before = worker.record
        worker.update(state, now)
        after = worker.record
        if after.role is not before.role:
            _log.info("worker %s is %s now", worker.id, after.role)
        elif after.moving_to is not before.moving_to:
            _log.info(
                "worker %s %s",
                worker.id,
                f"drains to be {after.moving_to}" if after.moving_to else f"stays {after.role}",
            )

    def _remove(self, worker: Worker) -> None:
        del self._workers[worker.id]
        self.generation += 1
        self._keep_until.pop(worker.id, None)
        if worker.source is Source.STORE and worker.role.decodes:
            self._departed[worker.id] = (worker, self._clock())
        _log.info("worker %s left", worker.id)

    def _learner(self, pool: PoolId) -> RateLearner:
        """Workers of a pool are alike: a new one starts from what the others have shown."""
        return self._learners.setdefault(pool, RateLearner())

    def _index(self) -> None:
        self._serving.clear()
        pools: defaultdict[PoolId, list[Worker]] = defaultdict(list)
        for key in sorted(self._workers):
            pools[self._workers[key].pool].append(self._workers[key])
        self._pools = {pool: tuple(workers) for pool, workers in pools.items()}
        self._learners = {pool: learner for pool, learner in self._learners.items() if pool in pools}

    def store_up(self) -> bool:
        """The store answered. Returns whether it had not before."""
        was_down = not self.store.up
        if was_down:
            _log.info("store answers; %s", "back after an outage" if self.store.problem else "connected")
        self.store = StoreStatus(configured=True, up=True)
        return was_down

    def store_down(self, problem: str) -> None:
        """The store did not answer; serving goes on from memory."""
        if self.store.up or not self.store.problem:
            _log.warning("store lost, serving from memory: %s", problem)
        self.store = StoreStatus(configured=True, up=False, problem=problem)

    def count_moving(self) -> dict[Role, int]:
        """How many workers drain for each role, every role present."""
        return {role: sum(worker.record.moving_to is role for worker in self._workers.values()) for role in Role}

    def learned_rates(self, pool: PoolId) -> Rates | None:
        """How fast the usual worker of a pool was seen to be; None while that is a mere prior."""
        learner = self._learners.get(pool)
        return learner.rates if learner is not None and learner.is_learned else None

    def count_by_role(self) -> dict[Role, int]:
        """How many workers each role has, every role present."""
        return {role: sum(worker.role is role for worker in self._workers.values()) for role in Role}
