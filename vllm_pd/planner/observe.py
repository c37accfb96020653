"""From the store to a `PoolView`: who is there, what waits, what arrived, how fast workers are, what is starting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from vllm_pd.errors import ActuatorError, StoreError
from vllm_pd.planner.actuator import Actuator
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.model import PLANNER, PoolView, QueueView, StartView, Traffic, WorkerView
from vllm_pd.planner.observe_demand import DemandWatch, usual_rates
from vllm_pd.roles import is_held
from vllm_pd.state.base import Epoch, MoveState, PoolId, Registry, WorkerId, WorkerState
from vllm_pd.state.demand import DemandBoard, DemandReport
from vllm_pd.state.prefill_queue import PrefillQueue
from vllm_pd.state.roles import Roles, WantedRole

_OLDEST = 64
"""Jobs of the queue among which the oldest is looked for; each stream has its oldest among the first."""

_NEVER_STEPPED_S = 15.0
"""A worker that is registered for so long and has no load report has made no step yet: from its first step on its agent
keeps a report in the store."""

Start = tuple[WorkerId, Epoch]


@dataclass(slots=True)
class _Since:
    """Since when something has been as it is."""

    value: object
    at_s: float


@dataclass(slots=True)
class _PoolMemory:
    """What one look needs of the ones before it."""

    demand: DemandWatch = field(default_factory=DemandWatch)
    loads: dict[Start, _Since] = field(default_factory=dict)
    moves: dict[Start, _Since] = field(default_factory=dict)
    silent: dict[Start, _Since] = field(default_factory=dict)
    """Workers of which no load report was ever seen."""


class Observer:
    """Looks at the pools of a namespace. What it is given stays open.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        registry: Registry,
        demand: DemandBoard,
        queue: PrefillQueue,
        roles: Roles,
        actuator: Actuator,
        config: PlannerConfig,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._demand = demand
        self._queue = queue
        self._roles = roles
        self._actuator = actuator
        self._config = config
        self._clock = clock
        self._pools: dict[PoolId, _PoolMemory] = {}
        self._listed_s: float | None = None
        """When the list of workers was asked for."""

    async def pools(self) -> Mapping[PoolId, Sequence[WorkerState]]:
        """The live workers by pool. Raises StoreError."""
        asked_s = self._clock()
        found: dict[PoolId, list[WorkerState]] = {}
        for state in (await self._registry.snapshot()).workers:
            found.setdefault(state.record.pool.id, []).append(state)
        self._listed_s = asked_s
        self._pools = {pool: memory for pool, memory in self._pools.items() if pool in found}
        return found

    async def view(self, pool: PoolId, workers: Sequence[WorkerState], at_s: float) -> PoolView:
        """Everything that is known of one pool at `at_s`, the time that all planners share. What cannot be read is
        unknown, and `partial` says so."""
        read_s = self._clock() if self._listed_s is None else self._listed_s
        memory = self._pools.setdefault(pool, _PoolMemory())
        problems: list[str] = []
        wishes: Mapping[WorkerId, WantedRole] = {}
        reports: Mapping[str, DemandReport] | None = None
        queue: QueueView | None = None
        starts: Sequence[StartView] = ()
        try:
            wishes = await self._roles.get(pool)
        except StoreError as e:
            problems.append(f"wishes for roles ({e})")
        try:
            reports = await self._demand.read(pool)
        except StoreError as e:
            problems.append(f"what arrived ({e})")
        try:
            queue = await self._look_at_queue(pool)
        except StoreError as e:
            problems.append(f"the prefill queue ({e})")
        try:
            starts = await self._actuator.starting(pool)
        except ActuatorError as e:
            problems.append(f"what is starting ({e})")
        now_s = self._clock()
        traffic: Traffic | None = None
        if reports is not None:
            # Else the next look tells of all the time since the last one.
            traffic = memory.demand.look(reports, now_s, ttft_s=self._config.ttft_s, itl_s=self._config.itl_s)
        return PoolView(
            pool=pool,
            at_s=at_s,
            workers=self._workers(memory, workers, wishes, now_s),
            queue=queue,
            traffic=traffic,
            rates=usual_rates(reports or {}),
            kv_tokens=_kv_tokens(workers),
            starts=tuple(starts),
            age_s=now_s - read_s,
            partial="; ".join(problems),
        )

    async def _look_at_queue(self, pool: PoolId) -> QueueView:
        depths = await self._queue.depth(pool, await self._queue.streams(pool))
        waiting = sum(depth.waiting for depth in depths.values())
        oldest_ms = 0
        if waiting:
            jobs = await self._queue.jobs(pool, _OLDEST)
            oldest_ms = max((job.age_ms for job in jobs if not job.claimant), default=0)
        return QueueView(waiting, sum(depth.waiting_tokens for depth in depths.values()), oldest_ms / 1000)

    def _workers(
        self,
        memory: _PoolMemory,
        workers: Sequence[WorkerState],
        wishes: Mapping[WorkerId, WantedRole],
        now_s: float,
    ) -> tuple[WorkerView, ...]:
        starts = {(state.record.id, state.record.epoch) for state in workers}
        memory.loads = {start: since for start, since in memory.loads.items() if start in starts}
        memory.moves = {start: since for start, since in memory.moves.items() if start in starts}
        memory.silent = {start: since for start, since in memory.silent.items() if start in starts}
        return tuple(_worker(memory, state, wishes.get(state.record.id), now_s) for state in workers)


def _worker(memory: _PoolMemory, state: WorkerState, wish: WantedRole | None, now_s: float) -> WorkerView:
    record = state.record
    start = (record.id, record.epoch)
    move = record.move
    moving_for_s = 0.0
    if record.moving_to is not None and move is not None:
        moving_for_s = now_s - _since(memory.moves, start, move.id, now_s)
    wished = wish is not None and wish.epoch == record.epoch and wish.by not in ("", PLANNER)
    # Taken up already: what the worker says of it counts, also that somebody has taken the hold back since.
    wished = wished and wish is not None and (move is None or move.id != wish.id)
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    load_age_s: float | None = None
    if state.loads:
        running, waiting, kv_usage = state.running, state.waiting, state.kv_usage
        newest = max(load.at_ms for load in state.loads.values())
        since_s = _since(memory.loads, start, newest, now_s)
        # An idle engine makes no steps and has nothing new to say; that its report is there says that it lives.
        load_age_s = now_s - since_s if running or waiting else 0.0
    elif start not in memory.loads and now_s - _since(memory.silent, start, None, now_s) >= _NEVER_STEPPED_S:
        running, waiting, kv_usage, load_age_s = 0, 0, 0.0, 0.0
    return WorkerView(
        record.id,
        record.epoch,
        record.role,
        moving_to=record.moving_to,
        moving_for_s=moving_for_s,
        asked_by=move.by if move is not None and move.state is not MoveState.UNDONE else "",
        is_held=wished or is_held(record),
        running=running,
        waiting=waiting,
        kv_usage=kv_usage,
        load_age_s=load_age_s,
        startup_s=record.startup_s or None,
    )


def _since(seen: dict[Start, _Since], start: Start, value: object, now_s: float) -> float:
    """When this value of a worker was first seen here: clocks of other machines are compared with nothing."""
    known = seen.get(start)
    if known is None or known.value != value:
        known = seen[start] = _Since(value, now_s)
    return known.at_s


def _kv_tokens(workers: Sequence[WorkerState]) -> int | None:
    sizes = [state.record.kv_blocks * state.record.pool.block_size for state in workers if state.record.kv_blocks]
    return int(median(sizes)) if sizes else None
