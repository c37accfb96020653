"""A cluster in a few lines, for tests of the planner's core: no requests, only loads and delays. Deterministic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.memory import Memory, decode_memory, encode_memory
from vllm_pd.planner.model import (
    PLANNER,
    AddAction,
    Latency,
    MoveAction,
    Plan,
    PoolView,
    QueueView,
    RemoveAction,
    StartView,
    Traffic,
    WorkerView,
)
from vllm_pd.planner.plan import step
from vllm_pd.routing.model import Rates
from vllm_pd.state.base import Epoch, PoolId, Role, WorkerId

POOL = PoolId("0123456789abcdef")
RATES = Rates(prefill_base=0.02, prefill_token=1e-4, prefill_square=0.0, step_base=0.02, step_sequence=5e-4)
KV_TOKENS = 200_000


@dataclass(frozen=True)
class Load:
    """What arrives: requests a second, and tokens of a prompt and of an answer."""

    arrivals: float
    prompt: float = 2000.0
    output: float = 300.0


@dataclass
class ToyWorker:
    id: WorkerId
    role: Role
    epoch: Epoch = Epoch(1)
    to: Role | None = None
    moves_until: float = 0.0
    leaves_at: float | None = None
    held: bool = False


@dataclass
class World:
    """Moves and starts take their time, or fail."""

    load: Callable[[float], Load]
    prefill: int = 4
    decode: int = 4
    both: int = 0
    move_s: float = 8.0
    start_s: float = 60.0
    startup_s: float | None = None
    """What its workers say that their starts took."""
    moves_fail: float = 0.0
    starts_fail: float = 0.0
    noise: bool = True
    seed: int = 0
    now: float = 0.0
    workers: dict[WorkerId, ToyWorker] = field(default_factory=dict)
    starting: list[tuple[float, Role, float]] = field(default_factory=list)
    """When asked for, as what, when it comes up (infinity: never)."""
    backlog: float = 0.0
    """Tokens that wait for prefill."""
    moves: list[tuple[float, WorkerId, Role]] = field(default_factory=list)
    undone: int = 0
    given_up: int = 0
    serial: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        for role, count in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode), (Role.BOTH, self.both)):
            for _ in range(count):
                self.add(role)

    def add(self, role: Role) -> ToyWorker:
        """A worker that is up at once."""
        self.serial += 1
        worker = ToyWorker(WorkerId(f"w{self.serial}"), role)
        self.workers[worker.id] = worker
        return worker

    def count(self, role: Role) -> int:
        """Workers at work in this role."""
        return sum(w.role is role and w.to is None and w.leaves_at is None for w in self.workers.values())

    def pass_time(self, seconds: float) -> None:
        """What was under way goes on."""
        self.now += seconds
        for worker in list(self.workers.values()):
            if worker.to is not None and worker.moves_until <= self.now:
                if self.chance.random() < self.moves_fail:
                    self.undone += 1
                else:
                    worker.role = worker.to
                worker.to = None
            if worker.leaves_at is not None and worker.leaves_at <= self.now:
                del self.workers[worker.id]
        for start in list(self.starting):
            if start[2] <= self.now:
                self.starting.remove(start)
                self.add(start[1])
        load = self.load(self.now)
        able = max(self.count(Role.PREFILL) + self.count(Role.BOTH), 0) / RATES.prefill_token
        self.backlog = max(0.0, self.backlog + (load.arrivals * load.prompt - able) * seconds)

    def view(self, seconds: float) -> PoolView:
        """What a planner sees of the last `seconds`."""
        load = self.load(self.now)
        mean = load.arrivals * seconds
        arrivals = max(0, round(mean + self.chance.gauss(0.0, math.sqrt(mean)) if self.noise else mean))
        decoders = max(1, self.count(Role.DECODE) + self.count(Role.BOTH))
        here = load.arrivals * load.output / decoders
        each = RATES.step_sequence
        streams = min(200.0, here * RATES.step_base / (1 - here * each) if here * each < 1 else 200.0)
        usage = min(1.0, streams * (load.prompt + load.output / 2) / KV_TOKENS)
        itl = RATES.step_base + each * streams
        able = max(1, self.count(Role.PREFILL) + self.count(Role.BOTH)) / RATES.prefill_token
        ttft = 0.05 + load.prompt * RATES.prefill_token + self.backlog / able
        starts = tuple(
            StartView(role, len(these), self.now - min(these))
            for role in Role
            if (these := [asked for asked, as_role, _ in self.starting if as_role is role])
        )
        return PoolView(
            POOL,
            self.now,
            tuple(
                WorkerView(
                    w.id,
                    w.epoch,
                    w.role,
                    moving_to=w.to,
                    asked_by=PLANNER if w.to is not None else "",
                    is_held=w.held,
                    draining=w.leaves_at is not None,
                    running=round(streams) if w.role is not Role.PREFILL else min(arrivals, 2),
                    waiting=0,
                    kv_usage=usage if w.role is not Role.PREFILL else 0.1,
                    load_age_s=0.2,
                    startup_s=self.startup_s,
                )
                for w in sorted(self.workers.values(), key=lambda w: w.id)
            ),
            QueueView(round(self.backlog / max(load.prompt, 1)), round(self.backlog)),
            Traffic(
                seconds,
                arrivals,
                arrivals,
                round(arrivals * load.prompt),
                round(arrivals * load.prompt),
                round(arrivals * load.output),
                load.output if arrivals else None,
                Latency(arrivals, ttft, ttft, ttft, float(ttft <= 1.0)) if arrivals else None,
                Latency(arrivals * 100, itl, itl, itl, float(itl <= 0.05)) if arrivals else None,
            ),
            RATES,
            KV_TOKENS,
            starts,
        )

    def obey(self, plan: Plan) -> None:
        """Begin what the plan says."""
        for given in plan.give_up:
            for start in [s for s in self.starting if s[1] is given.role][: given.count]:
                self.starting.remove(start)
                self.given_up += 1
        for action in plan.actions:
            match action:
                case MoveAction():
                    worker = self.workers.get(action.worker)
                    if worker is not None and worker.epoch == action.epoch and worker.to is None:
                        worker.to, worker.moves_until = action.to, self.now + self.move_s
                        self.moves.append((self.now, worker.id, action.to))
                case AddAction():
                    for _ in range(action.count):
                        fails = self.chance.random() < self.starts_fail
                        self.starting.append((self.now, action.role, math.inf if fails else self.now + self.start_s))
                case RemoveAction():
                    worker = self.workers.get(action.worker)
                    if worker is not None:
                        worker.leaves_at = self.now + self.move_s

    def run(
        self,
        config: PlannerConfig,
        steps: int,
        memory: Memory | None = None,
        seen: Callable[[int, PoolView], PoolView] = lambda _, view: view,
        check: Callable[[PoolView, Plan, World], None] | None = None,
    ) -> tuple[list[Plan], Memory]:
        """So many steps of a planner; `seen` changes what it sees of a step."""
        memory = memory or Memory()
        plans: list[Plan] = []
        for number in range(steps):
            self.pass_time(config.interval_s)
            view = seen(number, self.view(config.interval_s))
            plan, memory = step(view, memory, config)
            assert decode_memory(encode_memory(memory)) == memory
            if check is not None:
                check(view, plan, self)
            plans.append(plan)
            self.obey(plan)
        return plans, memory
