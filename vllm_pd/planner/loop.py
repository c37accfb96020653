"""The loop of a planner: look, decide, write down, act, tell what came of it; for each pool that it leads.

What is decided is written to the store, with the memory, before anything is begun, and only the leader can write it.
So a planner that ends in the middle leaves behind what it was about to do, and its successor does not do it again. A
planner that has lost its leadership, or does not know, begins nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_pd.background import end_tasks
from vllm_pd.errors import ActuatorError, DeposedError, StoreError
from vllm_pd.planner.actuator import Actuator
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.journal import Journal, Step, begin_step, decode_steps, encode_step, kind_of, with_outcome
from vllm_pd.planner.leader import Leadership, Led, steady_s
from vllm_pd.planner.memory import Memory, decode_memory, encode_memory
from vllm_pd.planner.metrics import Did, PlannerMetrics, PoolStatus
from vllm_pd.planner.model import Action, GiveUp, MoveAction, Plan, PoolView, RemoveAction
from vllm_pd.planner.observe import Observer
from vllm_pd.planner.outcome import remember_outcome, without
from vllm_pd.planner.plan import step
from vllm_pd.state.base import PoolId, Role, WorkerState
from vllm_pd.state.planner_board import PlannerBoard

_MOST_OWED = 32
"""Entries of the journal that are kept while the store does not take them."""
_SHORT_S = 3.0
"""An outage of the store in which no worker's lease can have ended. One that lost what it held is known otherwise."""

_ROUND = "round"

Decide = Callable[[PoolView, Memory, PlannerConfig], tuple[Plan, Memory]]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Planned:
    """A pool that this planner leads."""

    term: int
    memory: Memory
    journal: Journal = field(default_factory=Journal)
    owed: list[bytes] = field(default_factory=list)
    """Entries that are not in the store's journal yet. In a new term the last step of the planner before is, if that
    one ended in the middle of it."""


class PlannerLoop:
    """Make it, `run` it in one event loop. What it is given stays open.

    Args:
        statuses: what the metrics show; this is who writes it.
        settle_s: for so long after the store was away for a while, or had forgotten something, the list of workers is
            not trusted: they register again one by one.
        dry_run: decide, and begin nothing.
        clock: seconds; see `leader.steady_s`.
        decide: what makes the plans.
    """

    def __init__(
        self,
        config: PlannerConfig,
        observer: Observer,
        board: PlannerBoard,
        leadership: Leadership,
        actuator: Actuator,
        metrics: PlannerMetrics,
        statuses: dict[PoolId, PoolStatus],
        *,
        settle_s: float,
        dry_run: bool = False,
        clock: Callable[[], float] = steady_s,
        decide: Decide = step,
    ) -> None:
        self._config = config
        self._observer = observer
        self._board = board
        self._leadership = leadership
        self._actuator = actuator
        self._metrics = metrics
        self._statuses = statuses
        self._settle_s = settle_s
        self._dry_run = dry_run
        self._clock = clock
        self._decide_by = decide
        self._planned: dict[PoolId, _Planned] = {}
        self._away_s: float | None = None
        """Since when the store does not answer."""
        self._back_s: float | None = None
        """When the store answered again after it had not."""
        self._trouble: dict[str, str] = {}

    async def run(self) -> None:
        """Plan until cancelled. What is led then is left to its lease, or to `Leadership.resign`."""
        standing = asyncio.create_task(self._leadership.run())
        try:
            while True:
                began_s = self._clock()
                await self.guarded_round()
                await asyncio.sleep(max(0.0, began_s + self._config.interval_s - self._clock()))
        finally:
            await end_tasks([standing])

    async def guarded_round(self) -> None:
        """`round`, of which an error that nobody foresaw costs only this one."""
        try:
            await self.round()
        except Exception as e:
            self._unforeseen(_ROUND, e)
        else:
            self._trouble.pop(_ROUND, None)

    async def round(self) -> None:
        """One step of every pool. Never raises for a store that fails."""
        try:
            pools = await self._observer.pools()
        except StoreError as e:
            self._store_failed(_ROUND, e)
            return
        if self._away_s is not None:
            away_s, self._away_s = self._clock() - self._away_s, None
            if away_s >= _SHORT_S:
                self._back_s = self._clock()
            _log.info("the store answers again, after %.1f s", away_s)
        self._metrics.collector.store_up = True
        self._leadership.stand_for(list(pools))
        for gone in set(self._statuses) - set(pools):
            self._statuses.pop(gone)
            self._planned.pop(gone, None)
            self._trouble.pop(gone, None)
        await asyncio.gather(*(self._guarded_step(pool, workers) for pool, workers in pools.items()))

    async def _guarded_step(self, pool: PoolId, workers: Sequence[WorkerState]) -> None:
        """An error that nobody foresaw costs one step, not the planner."""
        try:
            await self._step(pool, workers)
        except StoreError as e:
            self._store_failed(pool, e)
        except Exception as e:
            self._unforeseen(pool, e)
            return
        self._trouble.pop(pool, None)

    def _unforeseen(self, what: str, error: Exception) -> None:
        """Of equal errors in a row only the first is logged."""
        if self._trouble.get(what) != repr(error):
            self._trouble[what] = repr(error)
            _log.error("a step (%s) failed, the next one is tried", what, exc_info=error)

    def _store_failed(self, what: str, error: StoreError) -> None:
        if self._away_s is None:
            self._away_s = self._clock()
            _log.warning("nothing is decided while the store does not answer (%s): %s", what, error)
        self._metrics.store_errors.inc()
        self._metrics.collector.store_up = False
        for pool, status in self._statuses.items():
            if status.leads and self._leadership.led(pool) is None:
                self._statuses[pool] = PoolStatus(leads=False)

    async def _step(self, pool: PoolId, workers: Sequence[WorkerState]) -> None:
        led = self._leadership.led(pool)
        if led is None:
            # Perhaps only because nobody has asked yet.
            await self._leadership.stand(pool)
            led = self._leadership.led(pool)
        if led is None:
            self._planned.pop(pool, None)
            self._statuses[pool] = PoolStatus(leads=False)
            return
        began_s = self._clock()
        planned = await self._take_up(pool, led)
        at_s = self._leadership.store_time_s(pool)
        view = await self._observer.view(pool, workers, at_s)
        plan, memory = await self._decide(pool, view, planned.memory)
        begun = begin_step(
            plan, pool, at_s=at_s, planner=self._leadership.planner, term=led.term, dry_run=self._dry_run
        )
        # Before anything is begun: whoever comes after this planner must know of it.
        if begun.done and not await self._write(pool, led, planned, memory, begun, kept=False):
            self._lost(pool, begun)
            return
        finished, memory = await self._act(pool, led, plan, view, begun, memory)
        planned.memory = memory
        if not await self._write(pool, led, planned, memory, finished, kept=True):
            self._lost(pool, finished)
            return
        if finished.done:
            _log.info("pool %s: %s", pool, finished.verdict)
        self._statuses[pool] = PoolStatus(True, view, plan, self._clock())
        self._metrics.know(pool)
        self._metrics.stepped(pool, kind_of(plan))
        self._metrics.step_seconds.observe(max(0.0, self._clock() - began_s))

    async def _take_up(self, pool: PoolId, led: Led) -> _Planned:
        """What the pool's leader remembers: in a new term what the one before left behind."""
        planned = self._planned.get(pool)
        if planned is None or planned.term != led.term:
            memory = decode_memory(await self._board.memory(pool))
            newest = decode_steps([await self._board.newest(pool)])
            owed = [encode_step(each) for each in newest if each.is_open]
            planned = self._planned[pool] = _Planned(led.term, memory, owed=owed)
        return planned

    async def _decide(self, pool: PoolId, view: PoolView, memory: Memory) -> tuple[Plan, Memory]:
        waits = self._settling(pool)
        if waits:
            return Plan(view.at_s, verdict=f"Nothing is changed: {waits}."), memory
        # It may take a while, and requests may be served in this loop.
        plan, after = await asyncio.to_thread(self._decide_by, view, memory, self._config)
        return plan, without(memory, after) if self._dry_run else after

    def _settling(self, pool: PoolId) -> str:
        """Why the list of workers may lack some; "" when it is trusted."""
        back_s = None if self._back_s is None else self._clock() - self._back_s
        if back_s is not None and back_s < self._settle_s:
            return f"the store came back {back_s:.0f} s ago, and workers may not have registered again"
        forgotten_s = self._leadership.forgotten_s(pool)
        if forgotten_s is not None and forgotten_s < self._settle_s:
            return f"the store lost what it held {forgotten_s:.0f} s ago, and workers may not have registered again"
        return ""

    async def _act(
        self, pool: PoolId, led: Led, plan: Plan, view: PoolView, step: Step, memory: Memory
    ) -> tuple[Step, Memory]:
        roles = _roles_about(plan, view)
        self._leadership.act_in(pool, led.term)
        for index, action in enumerate((*plan.give_up, *plan.actions)):
            did, detail = await self._begin(pool, led, action)
            step = with_outcome(step, index, did, detail)
            if not isinstance(action, GiveUp) and did is not Did.DRY_RUN:
                memory = remember_outcome(memory, action, did, self._config)
            self._metrics.acted(pool, action, roles[index], did)
            if did not in (Did.BEGUN, Did.DRY_RUN):
                _log.warning("pool %s: %s is %s: %s", pool, step.done[index].action, did, detail)
        return step, memory

    async def _begin(self, pool: PoolId, led: Led, action: Action | GiveUp) -> tuple[Did, str]:
        if self._dry_run:
            return Did.DRY_RUN, ""
        now = self._leadership.led(pool)
        if now is None or now.term != led.term:
            return Did.LOST, "This planner does not lead any more, or cannot be sure that it does."
        if not isinstance(action, GiveUp) and not self._actuator.can(action):
            return Did.IMPOSSIBLE, (await self._actuator.act(pool, action)).detail
        try:
            if isinstance(action, GiveUp):
                outcome = await self._actuator.give_up(pool, action.role, action.count)
            else:
                outcome = await self._actuator.act(pool, action)
        except DeposedError as e:
            return Did.LOST, str(e)
        except ActuatorError as e:
            return Did.UNKNOWN, str(e)
        except Exception as e:
            # Nobody foresaw it, so it may have been begun; were the step to fail, the next one would begin it again.
            _log.exception("pool %s: an actuator failed", pool)
            return Did.UNKNOWN, f"It failed unexpectedly, see the planner's log ({e!r})."
        return (Did.BEGUN if outcome.ok else Did.REFUSED), outcome.detail

    async def _write(
        self, pool: PoolId, led: Led, planned: _Planned, memory: Memory, step: Step, *, kept: bool
    ) -> bool:
        """False when another planner leads by now. `kept`: the step has ended, and may go to the journal."""
        if kept and (entry := planned.journal.entry(step)) is not None:
            planned.owed = [*planned.owed, encode_step(entry)][-_MOST_OWED:]
        written = await self._board.write(
            pool, led.term, memory=encode_memory(memory), newest=encode_step(step), journal=planned.owed
        )
        if written:
            planned.owed = []
        return written

    def _lost(self, pool: PoolId, step: Step) -> None:
        _log.warning("another planner leads pool %s; a step of this one is dropped: %s", pool, step.verdict)
        self._planned.pop(pool, None)
        self._statuses[pool] = PoolStatus(leads=False)


def _roles_about(plan: Plan, view: PoolView) -> list[Role]:
    """By the order in which it is done, the role that each thing is about."""
    known = {worker.id: worker.role for worker in view.workers}
    roles: list[Role] = [given_up.role for given_up in plan.give_up]
    for action in plan.actions:
        match action:
            case MoveAction():
                roles.append(action.to)
            case RemoveAction():
                roles.append(known.get(action.worker, Role.BOTH))
            case _:
                roles.append(action.role)
    return roles
