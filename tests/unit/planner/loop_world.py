"""A pool in a store in memory, planners that look at it, and an actuator that only writes down. Time is the test's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from tests.conformance.registry import POOL
from vllm_pd.errors import ActuatorError, StoreError
from vllm_pd.planner.actuator import Outcome
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.journal import Step, decode_steps
from vllm_pd.planner.leader import Leadership
from vllm_pd.planner.loop import Decide, PlannerLoop
from vllm_pd.planner.memory import AskedMove, Memory
from vllm_pd.planner.metrics import PREFIX, PlannerMetrics, PoolStatus, current
from vllm_pd.planner.model import Action, MoveAction, Plan, PoolView, StartView
from vllm_pd.planner.observe import Observer
from vllm_pd.state import Epoch, PoolId, PoolSpec, Role, WorkerId, WorkerLoad, WorkerRecord
from vllm_pd.state.memory_demand import MemoryDemandBoard
from vllm_pd.state.memory_planner_board import MemoryPlannerBoard
from vllm_pd.state.memory_prefill_queue import MemoryPrefillQueue
from vllm_pd.state.memory_registry import MemoryRegistry
from vllm_pd.state.memory_roles import MemoryRoles
from vllm_pd.state.memory_store import MemoryStore

LEASE_S = 15.0
LONG_MS = 10_000_000
IDLE = WorkerLoad(0, 0, 0.0, 1)
CONFIG = PlannerConfig(interval_s=5.0)
MOVE = MoveAction(WorkerId("w1:1"), Epoch(1), Role.DECODE, "a test wants it")


def worker(name: str, role: Role, spec: PoolSpec = POOL, **changes: Any) -> WorkerRecord:
    made = WorkerRecord(WorkerId(name), Epoch(1), spec, f"http://{name}", role, ("tiny",), nixl_host="h", kv_blocks=100)
    return replace(made, **changes)


class Notebook:
    """An actuator. `before` runs when it is asked; what it raises or returns is the answer."""

    name = "notebook"

    def __init__(self) -> None:
        self.asked: list[Action] = []
        self.given_up: list[tuple[Role, int]] = []
        self.able = True
        self.before: Callable[[Action], Awaitable[Outcome | None]] | None = None

    def can(self, action: Action) -> bool:
        return self.able

    async def act(self, pool: PoolId, action: Action) -> Outcome:
        if not self.able:
            return Outcome(False, "This notebook cannot do that.")
        self.asked.append(action)
        answer = await self.before(action) if self.before is not None else None
        return answer or Outcome(True)

    async def starting(self, pool: PoolId) -> Sequence[StartView]:
        return ()

    async def give_up(self, pool: PoolId, role: Role, count: int) -> Outcome:
        self.given_up.append((role, count))
        return Outcome(True)

    async def close(self) -> None:
        return None


class Cuttable:
    """A client of the store whose calls fail while `world.away`."""

    def __init__(self, inner: Any, world: World) -> None:
        self._inner, self._world = inner, world

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        async def call(*args: Any, **named: Any) -> Any:
            if self._world.away:
                raise StoreError("The store does not answer; start it.")
            return await method(*args, **named)

        return call


class Member:
    """One planner."""

    def __init__(self, world: World, name: str, decide: Decide, *, dry_run: bool = False) -> None:
        def clock() -> float:
            return world.now

        self.actuator = Notebook()
        self.registry = CollectorRegistry()
        self.statuses: dict[PoolId, PoolStatus] = {}
        self.board = Cuttable(MemoryPlannerBoard("test", world.store, dry=dry_run), world)
        self.leadership = Leadership(self.board, name, LEASE_S, clock)
        self.loop = PlannerLoop(
            CONFIG,
            Observer(world.registry, world.demand, world.queue, world.roles, self.actuator, CONFIG, clock),
            self.board,
            self.leadership,
            self.actuator,
            PlannerMetrics(
                self.registry,
                CONFIG,
                planner=name,
                dry_run=dry_run,
                statuses=lambda: current(self.statuses, self.leadership.leads),
                clock=clock,
            ),
            self.statuses,
            settle_s=20.0,
            dry_run=dry_run,
            clock=clock,
            decide=decide,
        )

    async def round(self) -> None:
        """Renew what is led, then one step of every pool, as time does it."""
        for pool in list(self.statuses):
            try:
                await self.leadership.stand(pool)
            except StoreError:
                continue
        await self.loop.round()

    def metric(self, name: str, /, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"{PREFIX}_{name}", labels)

    async def newest(self, pool: PoolId = POOL.id) -> Step:
        (step,) = decode_steps([await self.board.newest(pool)])
        return step

    async def journal(self, pool: PoolId = POOL.id) -> list[Step]:
        return decode_steps(await self.board.journal(pool, 100))


class World:
    """The store, and who is in it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.away = False
        self.store = MemoryStore(clock=lambda: self.now)
        self.registry = Cuttable(MemoryRegistry("test", self.store), self)
        self.demand = Cuttable(MemoryDemandBoard("test", self.store), self)
        self.queue = Cuttable(MemoryPrefillQueue("test", self.store), self)
        self.roles = Cuttable(MemoryRoles("test", self.store), self)

    async def join(self, record: WorkerRecord, load: WorkerLoad | None = IDLE) -> None:
        await self.registry.heartbeat(record, LONG_MS)
        if load is not None:
            await self.registry.publish_load(record.id, record.pool.id, 0, {0: load}, LONG_MS)

    async def start(self) -> World:
        for n in range(1, 5):
            await self.join(worker(f"w{n}:1", Role.PREFILL if n <= 2 else Role.DECODE))
        return self

    def planner(self, name: str, decide: Decide, *, dry_run: bool = False) -> Member:
        return Member(self, name, decide, dry_run=dry_run)


class Script:
    """Decides what it is told, once for each memory: what was asked for is remembered and not asked for again."""

    def __init__(self, *actions: Action, plan: Plan | None = None) -> None:
        self.actions = actions
        self.plan = plan
        self.views: list[PoolView] = []
        self.memories: list[Memory] = []

    def __call__(self, view: PoolView, memory: Memory, config: PlannerConfig) -> tuple[Plan, Memory]:
        self.views.append(view)
        self.memories.append(memory)
        memory = replace(memory, clock=memory.clock + 1, last_at=view.at_s)
        if self.plan is not None:
            return replace(self.plan, at_s=view.at_s), memory
        asked = {each.worker for each in memory.asked_moves}
        new = tuple(each for each in self.actions if not isinstance(each, MoveAction) or each.worker not in asked)
        moves = [each for each in new if isinstance(each, MoveAction)]
        remembered = [AskedMove(each.worker, each.epoch, each.to, memory.clock) for each in moves]
        verdict = f"{len(new)} changes." if new else "As it is."
        plan = Plan(view.at_s, new, (), verdict, ("A reason.",), {"load": 0.5})
        return plan, replace(memory, asked_moves=(*memory.asked_moves, *remembered))


async def unknown(action: Action) -> Outcome:
    raise ActuatorError("The machine room does not answer; walk there.")
