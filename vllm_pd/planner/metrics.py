"""What a planner counts and shows, as Prometheus metrics. What is not known is not there; nothing is 0 instead.

Only the leading planner of a pool shows the pool; every planner shows whether it leads.
"""

from __future__ import annotations

import math
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.model import Action, AddAction, GiveUp, Latency, MoveAction, Plan, PoolView, RemoveAction
from vllm_pd.state.base import PoolId, Role

PREFIX = "vllm_pd_planner"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Verdict(StrEnum):
    """What a step came to, as a metric's label."""

    CHANGES = "changes"
    KEPT = "kept"
    """It was decided that things stay as they are."""
    BLIND = "blind"
    """Too little is known to decide anything."""


class Did(StrEnum):
    """What came of an action, as a metric's label and in the journal."""

    BEGUN = "begun"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    """Whatever was to do it did not answer."""
    IMPOSSIBLE = "impossible"
    """No actuator knows how."""
    DRY_RUN = "dry_run"
    LOST = "lost"
    """The planner did not lead any more."""


def action_name(action: Action | GiveUp) -> str:
    """`move`, `add`, `remove` or `give_up`."""
    match action:
        case MoveAction():
            return "move"
        case AddAction():
            return "add"
        case RemoveAction():
            return "remove"
        case GiveUp():
            return "give_up"


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool as its planner sees it now."""

    leads: bool
    """Whether this planner decides about it."""
    view: PoolView | None = None
    plan: Plan | None = None
    at_s: float = 0.0
    """Of the newest step, on the clock of the metrics."""


def current(statuses: Mapping[PoolId, PoolStatus], leads: Callable[[PoolId], bool]) -> dict[PoolId, PoolStatus]:
    """What the newest steps saw, without pools that this planner led then and does not lead any more: a step may take
    long, and the one after it may fail."""
    return {pool: status if not status.leads or leads(pool) else PoolStatus(False) for pool, status in statuses.items()}


class PlannerMetrics:
    """All metrics of one planner.

    Args:
        statuses: of the pools as they are now, see `current`.
        clock: that of `PoolStatus.at_s`.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        config: PlannerConfig,
        *,
        planner: str,
        dry_run: bool,
        statuses: Callable[[], Mapping[PoolId, PoolStatus]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = Counter(
            f"{PREFIX}_steps_total",
            "Steps of the planning of a pool, by what they came to.",
            ["pool", "verdict"],
            registry=registry,
        )
        self._actions = Counter(
            f"{PREFIX}_actions_total",
            "What was decided to be done (move, add, remove, give_up), by the role that it is about (of a move: the "
            "new one) and what came of it.",
            ["pool", "action", "role", "outcome"],
            registry=registry,
        )
        self.step_seconds = Histogram(
            f"{PREFIX}_step_seconds",
            "From looking at a pool to having begun what was decided.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.store_errors = Counter(
            f"{PREFIX}_store_errors_total", "Steps that failed because the store did not answer.", registry=registry
        )
        self.collector = _PoolCollector(config, planner, dry_run, statuses, clock)
        registry.register(self.collector)

    def know(self, pool: PoolId) -> None:
        """Have every series of a pool, so that a rate over it is never undefined."""
        for verdict in Verdict:
            self._steps.labels(pool, verdict)
        for role in (Role.PREFILL, Role.DECODE):
            for action in ("move", "add", "remove"):
                self._actions.labels(pool, action, role, Did.BEGUN)

    def stepped(self, pool: PoolId, verdict: Verdict) -> None:
        """Count a step."""
        self._steps.labels(pool, verdict).inc()

    def acted(self, pool: PoolId, action: Action | GiveUp, role: Role, did: Did) -> None:
        """Count what came of a decision; `role` as the metric says."""
        self._actions.labels(pool, action_name(action), role, did).inc()


class _PoolCollector(Collector):
    def __init__(
        self,
        config: PlannerConfig,
        planner: str,
        dry_run: bool,
        statuses: Callable[[], Mapping[PoolId, PoolStatus]],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._clock = clock
        self._statuses = statuses
        self._info = {
            "planner": planner,
            "mode": str(config.mode),
            "rule": str(config.rule),
            "dry_run": str(dry_run).lower(),
        }
        self.store_up: bool | None = None
        """Whether the store answered the last time; None before the first."""

    def collect(self) -> Iterator[Metric]:
        info = InfoMetricFamily(PREFIX, "This planner: its id, mode and rule, and whether it only tries out.")
        info.add_metric([], self._info)
        yield info
        target = _gauge("target_seconds", "Target for the time to the first token (ttft) and between two (itl).", "of")
        target.add_metric(["ttft"], self._config.ttft_s)
        target.add_metric(["itl"], self._config.itl_s)
        yield target
        yield GaugeMetricFamily(
            f"{PREFIX}_attainment_target", "Fraction of requests that are to meet each target.", self._config.attainment
        )
        if self.store_up is not None:
            yield GaugeMetricFamily(
                f"{PREFIX}_store_up", "1 when the store answered the last time it was asked.", int(self.store_up)
            )
        leader = _gauge("leader", "1 while this planner decides about the pool, 0 while another one does.", "pool")
        statuses = self._statuses()
        for pool, status in statuses.items():
            leader.add_metric([pool], int(status.leads))
        yield leader
        yield from self._pools({pool: status for pool, status in statuses.items() if status.leads})

    def _pools(self, statuses: Mapping[PoolId, PoolStatus]) -> Iterator[Metric]:
        age = _gauge("step_age_seconds", "Since the newest step of the pool's planning.", "pool")
        actual = _gauge("workers", "Workers of the pool by their role, those that leave it included.", "pool", "role")
        wanted = _gauge(
            "wanted_workers", "Workers by role once what is under way and was decided has been done.", "pool", "role"
        )
        moving = _gauge("moving_workers", "Workers that are changing their role, by the new one.", "pool", "role")
        starting = _gauge("starting_workers", "Workers that were asked for and have not come up.", "pool", "role")
        observed = _gauge(
            "observed_per_second",
            "What the routers of the pool had to do: requests that began, their prompt tokens, those of them to be "
            "computed (uncached_tokens), output tokens.",
            "pool",
            "what",
        )
        queue = _gauge("queue_tokens", "Prompt tokens that wait for a prefill worker.", "pool")
        latency = _gauge(
            "latency_seconds", "Measured since the step before: ttft, itl, by quantile.", "pool", "of", "quantile"
        )
        within = _gauge("attainment", "Fraction that met the target since the step before.", "pool", "of")
        estimate = _gauge("estimate", "What entered the newest decision: loads, needs, forecasts.", "pool", "name")
        for pool, status in statuses.items():
            view, plan = status.view, status.plan
            if view is None or plan is None:
                continue
            age.add_metric([pool], max(0.0, self._clock() - status.at_s))
            for role, count in roles_now(view).items():
                actual.add_metric([pool, role], count)
            for role, count in roles_wanted(view, plan).items():
                wanted.add_metric([pool, role], count)
            on_the_move = Tally(worker.moving_to for worker in view.workers if worker.moving_to is not None)
            to_come = Tally[Role]()
            for start in view.starts:
                to_come[start.role] += start.count
            for role in Role:
                moving.add_metric([pool, role], on_the_move[role])
                starting.add_metric([pool, role], to_come[role])
            if view.queue is not None:
                queue.add_metric([pool], view.queue.tokens)
            traffic = view.traffic
            if traffic is not None and traffic.seconds > 0:
                for what in ("arrivals", "prompt_tokens", "uncached_tokens", "output_tokens"):
                    observed.add_metric([pool, what], getattr(traffic, what) / traffic.seconds)
                _add_latency(latency, within, pool, "ttft", traffic.ttft)
                _add_latency(latency, within, pool, "itl", traffic.itl)
            for name, number in plan.numbers.items():
                if math.isfinite(number):
                    estimate.add_metric([pool, name], number)
        yield from (age, actual, wanted, moving, starting, observed, queue, latency, within, estimate)


def roles_now(view: PoolView) -> dict[Role, int]:
    """How many workers do each role's work, every role present."""
    found = Tally(worker.role for worker in view.workers)
    return {role: found[role] for role in Role}


def roles_wanted(view: PoolView, plan: Plan) -> dict[Role, int]:
    """How many there will be once what is under way and was decided has been done, every role present."""
    found = Tally(worker.moving_to or worker.role for worker in view.workers if not worker.draining)
    by_id = {worker.id: worker for worker in view.workers}
    for start in view.starts:
        found[start.role] += start.count
    for given_up in plan.give_up:
        found[given_up.role] -= given_up.count
    for action in plan.actions:
        match action:
            case MoveAction():
                worker = by_id.get(action.worker)
                if worker is not None and not worker.draining:
                    found[worker.moving_to or worker.role] -= 1
                    found[action.to] += 1
            case AddAction():
                found[action.role] += action.count
            case RemoveAction():
                worker = by_id.get(action.worker)
                if worker is not None and not worker.draining:
                    found[worker.moving_to or worker.role] -= 1
    return {role: max(0, found[role]) for role in Role}


def _add_latency(
    latency: GaugeMetricFamily, within: GaugeMetricFamily, pool: str, of: str, seen: Latency | None
) -> None:
    if seen is None or not seen.count:
        return
    latency.add_metric([pool, of, "0.5"], seen.p50_s)
    latency.add_metric([pool, of, "0.95"], seen.p95_s)
    within.add_metric([pool, of], seen.within)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
