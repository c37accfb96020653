"""One worker as this router sees it: what it says about itself, its engines, and how requests to it fare."""

from __future__ import annotations

from enum import StrEnum

from vllm_pd.router.breaker import CLOSED, Breaker, Circuit
from vllm_pd.router.signs_of_life import EngineReport
from vllm_pd.routing.ledger import EngineLedger
from vllm_pd.routing.rates import RateLearner
from vllm_pd.state.base import PoolId, Role, WorkerId, WorkerRecord, WorkerState
from vllm_pd.state.block_index import Holder


class Source(StrEnum):
    """How the router knows the worker."""

    STORE = "store"
    STATIC = "static"


class Worker:
    """Mutable, owned by the `Directory`. Times are the caller's monotonic seconds.

    Args:
        learner: what is known of how fast workers of its pool are.
        router: id under which this router publishes its own work; what the store says of it is known here already.
    """

    __slots__ = (
        "_learner",
        "_lease_end",
        "_others",
        "_reported_at",
        "_router",
        "breaker",
        "decodes",
        "engines",
        "hands_off",
        "hands_over",
        "id",
        "kv_usage",
        "lease_span",
        "pool",
        "record",
        "reports",
        "role",
        "running",
        "source",
        "waiting",
    )

    def __init__(self, state: WorkerState, source: Source, learner: RateLearner, router: str, now: float) -> None:
        self.id: WorkerId = state.record.id
        self.source = source
        self.breaker: Breaker = CLOSED
        """How requests to it fare. The `Directory` writes it."""
        self._learner = learner
        self._router = router
        self.record: WorkerRecord = state.record
        self.pool: PoolId = state.record.pool.id
        self.role: Role = state.record.role
        self.engines: tuple[EngineLedger, ...] = ()
        """One for each data-parallel rank."""
        self.reports: dict[int, EngineReport] = {}
        """The newest load report of each of them that has ever made one."""
        self._reported_at: tuple[int, ...] = ()
        self._others = (0, 0)
        self._start_engines()
        self.decodes = False
        """Whether it gets requests to decode; one that leaves that, on its way to another role, does not."""
        self.hands_over = False
        """Whether it may prefill for other workers; not while it is on its way to another role."""
        self.hands_off = False
        """Whether others are to go on with the streams that it has begun, where that is exact."""
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.lease_span = 0.0
        """What was left of the lease, in seconds, when the worker was last seen alive."""
        self._lease_end = 0.0
        self.update(state, now)

    @property
    def url(self) -> str:
        return self.record.url

    @property
    def inflight(self) -> int:
        """This router's own requests on the worker now."""
        return sum(engine.inflight for engine in self.engines)

    def update(self, state: WorkerState, now: float) -> None:
        """Take over a newer state of the same worker. A new epoch is a new process: old failures do not count."""
        before = self.record
        if state.record is not before:
            self.record = state.record
            self.role = state.record.role
            if state.record.pool != before.pool:
                self.pool = state.record.pool.id
            if state.record.epoch != before.epoch or state.record.dp_size != before.dp_size:
                self.breaker = CLOSED
                self._start_engines()
            for engine in self.engines:
                engine.pool, engine.role = self.pool, self.role
        self._take_role(state.record)
        self.lease_span = state.lease_left_ms / 1000
        self._lease_end = now + self.lease_span
        reported_at = tuple(load.at_ms for load in state.loads.values())
        if reported_at != self._reported_at:
            self._reported_at = reported_at
            for rank, load in state.loads.items():
                known = self.reports.get(rank)
                if known is None or known.at_ms != load.at_ms:
                    self.reports[rank] = EngineReport(load.at_ms, load.running + load.waiting, now)
            self.running, self.waiting, self.kv_usage = state.running, state.waiting, state.kv_usage
            self._report(state, now)
        others = [work for router, work in state.others.items() if router != self._router]
        total = (sum(work.prefill_tokens for work in others), sum(work.requests for work in others))
        if total != self._others:
            self._others = total
            # Which rank they are on is not said.
            share = len(self.engines)
            for engine in self.engines:
                engine.report_others(total[0] // share, -(-total[1] // share), now)

    def _take_role(self, record: WorkerRecord) -> None:
        role, to = record.role, record.moving_to
        leaves_decode = to is not None and role.decodes and not to.decodes
        leaves_prefill = to is not None and role.prefills and not to.prefills
        self.decodes = role.decodes and not leaves_decode
        self.hands_over = self.can_hand_over and not leaves_decode and not leaves_prefill
        self.hands_off = leaves_decode and record.move is not None and record.move.hand_over

    @property
    def can_hand_over(self) -> bool:
        """Whether it prefills for other workers, be it as a last resort."""
        return self.role.prefills and self.record.can_transfer

    def _start_engines(self) -> None:
        """Requests in progress end on the engines of the process that they were sent to."""
        ranks = max(1, self.record.dp_size)
        self.engines = tuple(
            EngineLedger(
                Holder(self.id, rank), self.pool, self.role, self.record.kv_blocks // ranks, learner=self._learner
            )
            for rank in range(ranks)
        )
        for engine in self.engines:
            engine.ordered = self.record.by_priority
        self.reports = {}
        self._reported_at = ()
        self._others = (0, 0)

    def _report(self, state: WorkerState, now: float) -> None:
        if len(self.engines) == 1:
            self.engines[0].report(state.running, state.waiting, state.kv_usage, now)
            return
        for engine in self.engines:
            load = state.loads.get(engine.holder.rank)
            if load is not None:
                engine.report(load.running, load.waiting, load.kv_usage, now)

    def lease_left_ms(self, now: float) -> int:
        """What is left of the lease as last seen, not below 0."""
        return max(0, int((self._lease_end - now) * 1000))

    def is_usable(self, now: float) -> bool:
        """Whether a request may go there now, as long as others could serve it too."""
        return self.breaker.allows(now)

    @property
    def is_broken(self) -> bool:
        """Whether its breaker is open. One that is only too busy, or on trial, is not."""
        return self.breaker.circuit is Circuit.OPEN
