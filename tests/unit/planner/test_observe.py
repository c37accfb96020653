"""What a planner makes of what the store says about workers."""

from __future__ import annotations

from dataclasses import replace

from tests.conformance.registry import POOL
from tests.unit.planner.loop_world import CONFIG, LONG_MS, Notebook, World, worker
from vllm_pd.planner.model import PoolView, WorkerView
from vllm_pd.planner.observe import Observer
from vllm_pd.state import Epoch, Role, WantedRole, WorkerId, WorkerLoad
from vllm_pd.state.base import MoveState, RoleMove
from vllm_pd.state.demand import DemandReport
from vllm_pd.state.prefill_queue import JobId, PrefillJob

NAME = WorkerId("a:1")


class Eyes:
    def __init__(self) -> None:
        self.world = World()
        self.observer = Observer(
            self.world.registry,
            self.world.demand,
            self.world.queue,
            self.world.roles,
            Notebook(),
            CONFIG,
            lambda: self.world.now,
        )

    async def view(self) -> PoolView:
        return await self.observer.view(POOL.id, (await self.observer.pools())[POOL.id], 5.0)

    async def worker(self) -> WorkerView:
        (found,) = (await self.view()).workers
        return found

    async def load(self, running: int, at_ms: int) -> None:
        load = {0: WorkerLoad(running, 0, 0.5, at_ms)}
        await self.world.registry.publish_load(NAME, POOL.id, 0, load, LONG_MS)


async def test_a_busy_worker_that_says_nothing_new_has_an_old_load_and_an_idle_one_has_not() -> None:
    eyes = Eyes()
    await eyes.world.join(worker(NAME, Role.DECODE), None)
    await eyes.load(3, 1)
    assert (await eyes.worker()).load_age_s == 0
    eyes.world.now += 20
    seen = await eyes.worker()
    assert (seen.running, seen.load_age_s) == (3, 20)
    await eyes.load(0, 2)
    eyes.world.now += 20
    seen = await eyes.worker()
    assert (seen.running, seen.load_age_s) == (0, 0)


async def test_a_worker_that_never_made_a_step_is_idle_after_a_while_and_unknown_before() -> None:
    eyes = Eyes()
    await eyes.world.join(worker(NAME, Role.DECODE), None)
    assert (await eyes.worker()).running is None
    eyes.world.now += 20
    assert (await eyes.worker()).running == 0


async def test_a_report_that_is_gone_leaves_the_load_unknown() -> None:
    eyes = Eyes()
    await eyes.world.join(worker(NAME, Role.DECODE), None)
    await eyes.world.registry.publish_load(NAME, POOL.id, 0, {0: WorkerLoad(1, 0, 0.1, 1)}, 1000)
    assert (await eyes.worker()).running == 1
    eyes.world.now += 60
    assert (await eyes.worker()).running is None


async def test_moves_are_timed_here_and_people_s_wishes_hold_a_worker() -> None:
    eyes = Eyes()
    moving = RoleMove("m1", Role.PREFILL, "planner", MoveState.DRAINING, 1)
    await eyes.world.join(worker(NAME, Role.DECODE, move=moving))
    await eyes.worker()
    eyes.world.now += 7
    seen = await eyes.worker()
    assert (seen.role, seen.moving_to, seen.moving_for_s) == (Role.DECODE, Role.PREFILL, 7)
    assert (seen.asked_by, seen.is_held) == ("planner", False)
    await eyes.world.roles.set(POOL.id, NAME, WantedRole(Role.DECODE, Epoch(1), "m2", "operator"), LONG_MS)
    assert (await eyes.worker()).is_held
    done = replace(moving, id="m2", to=Role.DECODE, by="operator", state=MoveState.DONE)
    await eyes.world.join(worker(NAME, Role.DECODE, move=done))
    assert (await eyes.worker()).is_held
    # Somebody took the hold back; the old wish is still there and has been taken up.
    await eyes.world.join(worker(NAME, Role.DECODE, move=replace(done, by="")))
    assert not (await eyes.worker()).is_held


async def test_the_queue_is_what_waits_and_a_store_that_fails_is_partial_not_empty() -> None:
    eyes = Eyes()
    await eyes.world.join(worker(NAME, Role.PREFILL))
    await eyes.world.queue.put(POOL.id, PrefillJob(JobId("j1"), 700, b"x"), LONG_MS)
    eyes.world.now += 2
    view = await eyes.view()
    assert view.queue is not None
    assert (view.queue.requests, view.queue.tokens, view.queue.oldest_s) == (1, 700, 2)
    assert view.kv_tokens == 3200
    states = (await eyes.observer.pools())[POOL.id]
    eyes.world.away = True
    view = await eyes.observer.view(POOL.id, states, 5.0)
    assert (view.queue, view.traffic) == (None, None)
    assert "the prefill queue" in view.partial
    assert view.rates is None
    assert "what arrived" in view.partial


async def test_what_arrived_while_the_store_was_away_for_a_look_is_known_at_the_next() -> None:
    eyes = Eyes()
    await eyes.world.join(worker(NAME, Role.PREFILL))

    async def report(arrivals: int) -> None:
        made = DemandReport(0, round(eyes.world.now * 1000), arrivals)
        await eyes.world.demand.publish(POOL.id, "r1", made, LONG_MS)

    await report(100)
    await eyes.view()
    states = (await eyes.observer.pools())[POOL.id]
    eyes.world.now += 10
    eyes.world.away = True
    assert (await eyes.observer.view(POOL.id, states, 5.0)).traffic is None
    eyes.world.away = False
    eyes.world.now += 10
    await report(140)
    traffic = (await eyes.view()).traffic
    assert traffic is not None
    assert (traffic.seconds, traffic.arrivals) == (20.0, 40)


async def test_the_list_of_workers_is_as_old_as_the_look_at_the_registry() -> None:
    eyes = Eyes()
    await eyes.world.join(worker(NAME, Role.PREFILL))
    states = (await eyes.observer.pools())[POOL.id]
    eyes.world.now += 12
    assert (await eyes.observer.view(POOL.id, states, 5.0)).age_s == 12
