"""Planners on a real store: with mock workers and a router under load, beside each other, killed, stopped, cut off."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.conformance.registry import POOL
from tests.unit.planner.loop_world import IDLE, LONG_MS, worker
from vllm_pd.background import end_tasks
from vllm_pd.errors import StoreError
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.planner.journal import Step, decode_steps
from vllm_pd.planner.service import PlannerService
from vllm_pd.planner.settings import PlannerSettings, load
from vllm_pd.router.service import RouterService
from vllm_pd.router.settings import RouterSettings
from vllm_pd.routing.speed import Rates
from vllm_pd.sim.mock_host import MockHost
from vllm_pd.sim.mock_tokenizer import MockTokenizer
from vllm_pd.sim.mock_worker import MockConfig
from vllm_pd.state import PoolId, Role
from vllm_pd.state.demand import DemandReport
from vllm_pd.state.open_registry import open_demand, open_planner_board, open_registry, open_roles

DEADLINE_S = 200.0
"""For what takes seconds on an idle machine."""
NAMESPACE = "planned"
PER_SECOND = 16
"""Prompts of 8000 tokens, each of which takes the usual worker a sixth of a second."""
PROGRAM = str(Path(sys.executable).parent / "vllm-pd")


async def eventually(holds: Callable[[], Awaitable[object]], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not await holds():
        assert time.monotonic() < deadline, f"it did not happen: {what}"
        await asyncio.sleep(0.1)


def settings(store: EmbeddedStore, **changes: Any) -> PlannerSettings:
    values = {
        "store": store.url,
        "namespace": NAMESPACE,
        "interval": 1.0,
        "lease": 6.0,
        "settle": 2.0,
        "cooldown": 2.0,
        "move_timeout": 20.0,
        **changes,
    }
    return load(flags=values).value


@pytest.fixture
def store() -> Any:
    with EmbeddedStore() as running:
        yield running


class Pool:
    """What planners see and write, as the tests look at it. Its workers are entries of the store that nobody serves."""

    def __init__(self, store: EmbeddedStore) -> None:
        self.store = store
        self.registry = open_registry(store.url, NAMESPACE, timeout_s=30.0)
        self.roles = open_roles(store.url, NAMESPACE, timeout_s=30.0)
        self.board = open_planner_board(store.url, NAMESPACE, timeout_s=30.0)
        self.dry = open_planner_board(store.url, NAMESPACE, timeout_s=30.0, dry=True)
        self.demand = open_demand(store.url, NAMESPACE, timeout_s=30.0)
        self.wishes: dict[str, set[str]] = {}
        """Ids of all wishes that were seen, by worker."""
        self._began_s = time.time()
        self._started_ms = round(self._began_s * 1000) - 3_600_000

    async def register(self) -> None:
        for n in range(1, 7):
            record = worker(f"w{n}:1", Role.PREFILL if n <= 2 else Role.DECODE)
            await self.registry.heartbeat(record, LONG_MS)
            await self.registry.publish_load(record.id, POOL.id, 0, {0: IDLE}, LONG_MS)

    async def report(self) -> None:
        """A router tells of long prompts and short answers: more than two workers prefill, fewer than four."""
        now_s = time.time()
        arrived = int(PER_SECOND * (now_s - self._began_s))
        report = DemandReport(
            self._started_ms,
            round(now_s * 1000),
            arrivals=arrived,
            finished=arrived,
            prompt_tokens=arrived * 8000,
            uncached_tokens=arrived * 8000,
            output_tokens=arrived * 2,
            finished_output_tokens=arrived * 2,
            rates=Rates(),
        )
        await self.demand.publish(POOL.id, "r1", report, LONG_MS)

    async def look(self) -> None:
        for id, wish in (await self.roles.get(POOL.id)).items():
            self.wishes.setdefault(id, set()).add(wish.id)

    async def keep_up(self) -> None:
        """Report and look until cancelled."""
        while True:
            await self.report()
            await self.look()
            await asyncio.sleep(0.2)

    async def leader(self, pool: PoolId = POOL.id) -> str:
        found = await self.board.leader(pool)
        return found.planner if found is not None else ""

    async def newest(self) -> Step | None:
        steps = decode_steps([await self.board.newest(POOL.id)])
        return steps[0] if steps else None

    async def close(self) -> None:
        for each in (self.registry, self.roles, self.board, self.dry, self.demand):
            await each.close()


@pytest.fixture
async def pool(store: EmbeddedStore) -> AsyncIterator[Pool]:
    made = Pool(store)
    await made.register()
    yield made
    await made.close()


@pytest.fixture
async def kept_up(pool: Pool) -> AsyncIterator[Pool]:
    task = asyncio.create_task(pool.keep_up())
    yield pool
    await end_tasks((task,))


async def test_when_the_load_shifts_to_prompts_a_worker_becomes_a_prefill_worker(store: EmbeddedStore) -> None:
    roles = [Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE]
    config = MockConfig(store=store.url, namespace=NAMESPACE, speed=0.25, kv_events=False, lease_s=30.0)
    async with AsyncExitStack() as stack:
        host = MockHost(config, roles, MockTokenizer(None))
        stack.push_async_callback(host.stop)
        await host.start()
        router = RouterService(
            RouterSettings(port=0, store=store.url, namespace=NAMESPACE, disagg="always", shutdown_grace=0.0),
            planner=settings(store, ttft=1.0, itl=0.5, lease=15.0, interval=2.0),
        )
        stack.push_async_callback(router.stop)
        await router.start()
        client = await stack.enter_async_context(aiohttp.ClientSession())
        failed: list[str] = []

        async def ask() -> None:
            while True:
                body = {"model": "mock", "prompt": os.urandom(4000).hex(), "max_tokens": 4, "stream": True}
                async with client.post(f"http://127.0.0.1:{router.port}/v1/completions", json=body) as answer:
                    text = (await answer.read()).decode()
                    if answer.status != 200 and "No worker" not in text:
                        failed.append(text)

        async def is_ready() -> bool:
            async with client.get(f"http://127.0.0.1:{router.port}/ready") as answer:
                return answer.status == 200 and len(router.directory.workers) == len(roles)

        async def has_moved() -> bool:
            return sum(each.role is Role.PREFILL for each in router.directory.workers) >= 2

        await eventually(is_ready, "the router is ready")
        clients = [asyncio.create_task(ask()) for _ in range(12)]
        await eventually(has_moved, "a decode worker became a prefill worker")
        await end_tasks(clients)
        assert failed == []
        assert any(each.decodes for each in router.directory.workers)
        pool = router.directory.workers[0].pool
        board = open_planner_board(store.url, NAMESPACE, timeout_s=30.0)
        steps = decode_steps(await board.journal(pool, 1000))
        await board.close()
        moves = [done for step in steps for done in step.done]
        assert {(done.action, done.role) for done in moves} >= {("move", "prefill")}
        # Every step is explained.
        assert all(step.verdict and (step.reasons or step.kind == "blind") for step in steps)
        assert all(done.why and done.did for done in moves)
        page = router.metrics.page().decode()
        assert f'vllm_pd_planner_leader{{pool="{pool}"}} 1.0' in page
        assert "vllm_pd_planner_attainment{" in page


async def test_a_dry_run_beside_nobody_changes_nothing_and_explains_itself(kept_up: Pool) -> None:
    planner = PlannerService(settings(kept_up.store, dry_run=True))
    planner.start()
    try:

        async def would_move() -> bool:
            steps = decode_steps(await kept_up.dry.journal(POOL.id, 1000))
            return any(done.did == "dry_run" for step in steps for done in step.done)

        await eventually(would_move, "it says what it would do")
    finally:
        await planner.stop()
    assert await kept_up.roles.get(POOL.id) == {}
    assert await kept_up.leader() == ""


async def test_nothing_is_moved_for_reports_that_stand_still(pool: Pool) -> None:
    await pool.report()
    planner = PlannerService(settings(pool.store))
    planner.start()
    try:
        seen: set[float] = set()

        async def several_steps() -> bool:
            newest = await pool.newest()
            if newest is not None:
                seen.add(newest.at_s)
            return len(seen) >= 4

        await eventually(several_steps, "it looks several times")
        newest = await pool.newest()
        assert newest is not None
        assert newest.kind == "blind"
        assert await pool.roles.get(POOL.id) == {}
    finally:
        await planner.stop()


async def start_process(pool: Pool) -> asyncio.subprocess.Process:
    told = settings(pool.store)
    command = [PROGRAM, "planner", "run", "--store", told.store, "--namespace", NAMESPACE, "--interval", "1"]
    # Nobody obeys the wishes here; they stay for as long as the test may take.
    command += ["--lease", f"{told.lease:g}", "--settle", "1", "--cooldown", "2", "--move-timeout", "3600"]
    return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)


async def test_when_the_leader_is_killed_another_goes_on_and_nobody_is_asked_twice(kept_up: Pool) -> None:
    pool = kept_up
    processes = [await start_process(pool), await start_process(pool)]
    try:

        async def has_asked() -> bool:
            return bool(pool.wishes)

        await eventually(has_asked, "a worker is asked")
        first = await pool.leader()
        leading = next(process for process in processes if f":{process.pid}:" in first)
        other = next(process for process in processes if process is not leading)
        leading.kill()
        await leading.wait()

        async def other_decides() -> bool:
            newest = await pool.newest()
            return newest is not None and f":{other.pid}:" in newest.planner

        await eventually(other_decides, "the other one decides")
        assert f":{other.pid}:" in await pool.leader()
        assert all(len(ids) == 1 for ids in pool.wishes.values())
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
        assert [await process.wait() for process in processes].count(0) == 1
    assert await pool.leader() == ""


async def test_a_leader_that_stands_still_has_lost_its_place_when_it_goes_on(kept_up: Pool) -> None:
    pool = kept_up
    processes = [await start_process(pool), await start_process(pool)]
    try:

        async def has_asked() -> bool:
            return bool(pool.wishes)

        await eventually(has_asked, "a worker is asked")
        first = await pool.leader()
        leading = next(process for process in processes if f":{process.pid}:" in first)
        leading.send_signal(signal.SIGSTOP)

        async def another_decides() -> bool:
            newest = await pool.newest()
            return newest is not None and newest.planner != first

        await eventually(another_decides, "another one decides")
        leading.send_signal(signal.SIGCONT)
        since = time.monotonic()
        while time.monotonic() < since + 3:
            newest = await pool.newest()
            assert newest is not None
            assert newest.planner != first
            await asyncio.sleep(0.1)
        assert all(len(ids) == 1 for ids in pool.wishes.values())
    finally:
        for process in processes:
            process.terminate()
        assert [await process.wait() for process in processes] == [0, 0]


async def test_a_store_that_comes_back_empty_is_led_again_and_not_believed_at_once(pool: Pool) -> None:
    planner = PlannerService(settings(pool.store, settle=15.0))
    planner.start()
    try:

        async def leads() -> bool:
            return await pool.newest() is not None

        await eventually(leads, "it has made a step")
        pool.store.stop()
        await asyncio.sleep(1)

        async def hesitates() -> bool:
            try:
                newest = await pool.newest()
            except StoreError:
                return False
            return newest is not None and "store" in newest.verdict

        # From before it is back: that time passes while workers register.
        seen = asyncio.create_task(eventually(hesitates, "it says that it waits for workers to register"))
        pool.store.start()
        await pool.register()
        await seen

        async def goes_on() -> bool:
            newest = await pool.newest()
            return newest is not None and "store" not in newest.verdict

        await eventually(goes_on, "it goes on")
        assert await pool.roles.get(POOL.id) == {}
    finally:
        await planner.stop()
