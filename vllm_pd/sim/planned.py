"""The planner in virtual time: it looks at a simulated cluster whose workers change, and they obey."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from vllm_pd.planner.memory import Memory
from vllm_pd.planner.model import (
    Action,
    AddAction,
    Plan,
    PoolView,
    QueueView,
    RemoveAction,
    StartView,
    WorkerView,
)
from vllm_pd.planner.observe_demand import DemandWatch
from vllm_pd.planner.plan import step
from vllm_pd.sim.changing import ChangingCluster
from vllm_pd.sim.planned_config import PlannedConfig
from vllm_pd.sim.planned_run import Member, PlannedRun, State
from vllm_pd.sim.trace import TraceRequest
from vllm_pd.state.base import PoolId, Role

_POOL = PoolId("simulated")

Step = Callable[[PoolView, Memory], tuple[Plan, Memory]]
"""A planner's step, its configuration included."""


class PlannedCluster(ChangingCluster):
    """Runs one trace once. `step` stands in for the planner's own."""

    def __init__(self, config: PlannedConfig, step: Step | None = None) -> None:
        super().__init__(config)
        self._planned = config
        self._step = step or _planner_step(config)
        self._memory = Memory()
        self._watch = DemandWatch()

    def simulate_planned(self, trace: Sequence[TraceRequest]) -> PlannedRun:
        """Replay a trace until its last request has ended, or for the grace after the last arrival."""
        planned = self.planned
        planned.arrivals = len(trace)
        planned.horizon = trace[-1].at / self.config.speed if trace else 0.0
        planner = self._planned.planner
        if self._step is not None and planner is not None:
            self._at(max(0.0, planner.interval_s - self._life.seen_after), self._look)
        if self._life.lost_per_hour:
            for member in list(self._by_index):
                self._doom(member, 0.0)
        self.simulate(trace, until=planned.horizon + self._planned.grace)
        return planned

    def _look(self, now: float) -> None:
        """What is seen now is what the planner goes by a little later."""
        planner = self._planned.planner
        assert planner is not None
        at = now + self._life.seen_after
        age = self._life.seen_after
        waiting = [
            (job.placement.uncached, at - job.served.arrived)
            for member in self._by_index
            if member.state in (State.UP, State.MOVING)
            for job in self._unstarted(member)
        ]
        starting = [m for m in self.planned.members if m.state is State.STARTING]
        starts = tuple(
            StartView(role, len(these), at - min(m.asked_at for m in these))
            for role in Role
            if (these := [m for m in starting if m.role is role])
        )
        report = self._counts.report(now, self._router.rates)
        traffic = self._watch.look({"router": report}, now, ttft_s=planner.ttft_s, itl_s=planner.itl_s)
        view = PoolView(
            pool=_POOL,
            at_s=at,
            workers=tuple(self._seen(m, at) for m in self._listed(now)),
            queue=QueueView(len(waiting), sum(w[0] for w in waiting), max((w[1] for w in waiting), default=0.0)),
            traffic=replace(traffic, age_s=age) if traffic is not None else None,
            rates=report.rates,
            kv_tokens=self.config.engine.gpu_blocks * self.config.engine.block_size,
            starts=starts,
            age_s=age,
        )
        self._at(at, lambda now: self._plan(view, now))
        self._at(now + planner.interval_s, self._look)

    def _plan(self, view: PoolView, now: float) -> None:
        assert self._step is not None
        plan, self._memory = self._step(view, self._memory)
        planned = self.planned
        planned.plans.append(plan)
        sizes = Counter(worker.role for worker in view.workers if not worker.draining)
        planned.sizes.append((now, sizes[Role.PREFILL], sizes[Role.DECODE], sizes[Role.BOTH]))
        for given in plan.give_up:
            self._give_up(given, now)
        for action in plan.actions:
            self._at(now + self._life.obeys_after, lambda now, action=action: self._act(action, now))  # type: ignore[misc]

    def _listed(self, now: float) -> Iterable[Member]:
        for member in self._by_index:
            if member.state is not State.GONE or (member.listed_until or 0.0) > now:
                yield member

    def _seen(self, member: Member, at: float) -> WorkerView:
        engine = self._workers[member.index].engine
        return WorkerView(
            id=member.id,
            epoch=member.epoch,
            role=member.role,
            moving_to=member.moving_to,
            moving_for_s=at - member.since if member.moving_to is not None else 0.0,
            asked_by=member.asked_by,
            draining=member.state is State.LEAVING,
            running=engine.running,
            waiting=engine.waiting,
            kv_usage=engine.kv_usage,
            load_age_s=self._life.seen_after,
            startup_s=member.startup_s,
        )

    def _act(self, action: Action, now: float) -> None:
        if isinstance(action, AddAction):
            for _ in range(action.count):
                self.planned.starts += 1
                self._start(action.role, now)
            return
        member = next(
            (m for m in self._by_index if (m.id, m.epoch, m.state) == (action.worker, action.epoch, State.UP)), None
        )
        if member is None:
            return
        if isinstance(action, RemoveAction):
            self.planned.removed += 1
            self._leave(member, now)
        elif action.to is not member.role:
            self._move(member, action.to, now)


def _planner_step(config: PlannedConfig) -> Step | None:
    planner = config.planner
    return None if planner is None else lambda view, memory: step(view, memory, planner)
