"""Workers change their roles under streams: the real agents and router, engines that are modelled."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from tests.unit.sim.conftest import Client, StartHost
from vllm_pd.background import end_tasks
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.planner.model import PLANNER
from vllm_pd.roles import Asked, Verdict, is_held, request_move, take_back, wait_for_move
from vllm_pd.router.breaker import CLOSED
from vllm_pd.router.service import RouterService
from vllm_pd.router.settings import RouterSettings
from vllm_pd.sim.mock_worker import MockWorker
from vllm_pd.sim.work import EngineConfig
from vllm_pd.state import MoveState, Registry, Role, RoleMove, Roles, WorkerRecord, open_registry, open_roles
from vllm_pd.state.open_registry import memory_store

COMPLETION = "/v1/completions"
PREFILL, DECODE, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
LONG_S = 240.0
ENGINE = EngineConfig(gpu_blocks=4096, block_size=16)
_names = itertools.count()


@dataclass
class Cluster:
    workers: list[MockWorker]
    router: RouterService
    registry: Registry
    roles: Roles
    client: Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.port}"

    def id(self, number: int) -> str:
        return self.workers[number].url.rpartition("/")[2]

    async def record(self, number: int) -> WorkerRecord:
        found = {state.record.id: state.record for state in (await self.registry.snapshot()).workers}
        return next(record for id, record in found.items() if id == self.id(number))

    async def ask(self, number: int, to: Role | None, **more: Any) -> Asked:
        return await request_move(self.registry, self.roles, self.id(number), to, **more)

    async def move(self, number: int, to: Role, **more: Any) -> RoleMove:
        asked = await self.ask(number, to, **more)
        assert asked.verdict is Verdict.ASKED and asked.record is not None and asked.wish is not None, asked.detail
        moved = await wait_for_move(self.registry, asked.record, asked.wish)
        assert moved.move is not None, moved.detail
        return moved.move

    async def stream(self, name: str, tokens: int, **fields: Any) -> str:
        """The text of a whole stream; fails if it has an error."""
        body = {"model": "mock", "prompt": f"{name} " * 40, "max_tokens": tokens, "ignore_eos": True, **fields}
        events = await self.client.chunks(self.url + COMPLETION, body)
        assert not [event for event in events if "error" in event], events[-1]
        assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "length"
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])

    def right(self, tokens: int) -> str:
        return self.workers[0].tokenizer.answer_text(0, tokens)

    def metric(self, name: str, **labels: str) -> float:
        return self.router.metrics.registry.get_sample_value(f"vllm_pd_router_{name}", labels) or 0.0

    async def see(self, holds: Callable[[], Any], what: str) -> None:
        try:
            async with asyncio.timeout(LONG_S):
                while not holds():  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"never happened: {what}") from None

    async def drains(self, number: int) -> None:
        """Wait until the router has heard that it does."""
        await self.see(lambda: self.router.directory.get(self.id(number)).record.moving_to, "it drains")  # type: ignore[arg-type, union-attr]

    def running(self, number: int) -> int:
        return self.workers[number].live.engine.running

    async def is_clean(self) -> None:
        """No worker has a request or holds a block."""
        await self.see(
            lambda: all(w.live.engine.pool.used == 0 and not w.live.engine.running for w in self.workers), "all is free"
        )


StartCluster = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def start(start_workers: StartHost, client: Client) -> AsyncIterator[StartCluster]:
    """Starts workers of these roles and a router on a store in memory, or on the one whose URL is given."""
    open: list[Any] = []
    client.session._timeout = aiohttp.ClientTimeout(total=LONG_S)

    async def start(*roles: Role, store: str = "", settings: dict[str, Any] | None = None, **config: Any) -> Cluster:
        url = store or f"memory://role-moves-{next(_names)}"
        workers = await start_workers(
            roles, **({"store": url, "namespace": "n", "speed": 4.0, "engine": ENGINE} | config)
        )
        values = replace(
            RouterSettings(),
            port=0,
            store=url,
            namespace="n",
            shutdown_grace=0.5,
            **({"disagg": "always"} | (settings or {})),
        )
        router = RouterService(values, refresh_s=0.05)
        await router.start()
        registry, wishes = open_registry(url, "n", timeout_s=5.0), open_roles(url, "n", timeout_s=5.0)
        open.extend((router.stop, registry.close, wishes.close))
        cluster = Cluster(workers, router, registry, wishes, client)
        await cluster.see(lambda: len(router.directory.workers) == len(workers), "the router knows every worker")
        return cluster

    yield start
    for close in open:
        await close()


@asynccontextmanager
async def load(cluster: Cluster, clients: int, tokens: int) -> AsyncIterator[list[str]]:
    """So many clients ask one stream after the other within the block; then every answer is checked."""
    answers: list[str] = []
    stop = asyncio.Event()

    async def ask(client: int) -> None:
        for turn in itertools.count():
            if stop.is_set():
                return
            answers.append(await cluster.stream(f"{client}-{turn}", tokens))

    async with asyncio.TaskGroup() as group:
        for client in range(clients):
            group.create_task(ask(client))
        yield answers
        stop.set()
    assert answers and set(answers) == {cluster.right(tokens)}


@pytest.mark.parametrize("moves", [4, pytest.param(20, marks=pytest.mark.slow)])
async def test_back_and_forth_under_load_no_request_fails_and_no_block_stays(start: StartCluster, moves: int) -> None:
    cluster = await start(PREFILL, DECODE, DECODE)
    async with load(cluster, clients=6, tokens=100) as answers:
        for number in range(moves):
            before = len(answers)
            to = PREFILL if number % 2 == 0 else DECODE
            move = await cluster.move(2, to)
            assert (move.state, move.to) == (MoveState.DONE, to), move
            await cluster.see(lambda before=before: len(answers) > before + 6, "requests go on")  # type: ignore[misc]
    record = await cluster.record(2)
    assert (record.role, record.role_epoch, record.moving_to) == (DECODE, moves, None)
    assert cluster.metric("broken_streams_total", outcome="ended", reason="") == 0
    await cluster.is_clean()


async def test_a_drained_worker_gets_nothing_of_what_it_left_and_all_of_what_it_took(start: StartCluster) -> None:
    cluster = await start(PREFILL, DECODE, DECODE)
    await cluster.move(2, PREFILL)
    await cluster.move(0, DECODE)
    await cluster.see(lambda: cluster.router.directory.get(cluster.id(0)).role is DECODE, "the router knows")  # type: ignore[arg-type, union-attr]
    before = cluster.workers[2].counters.generation_tokens
    await asyncio.gather(*(cluster.stream(f"p{n}", 5) for n in range(20)))
    # Each of its prompts ends with the one token of a prefill leg.
    legs = cluster.workers[2].prefill_stats
    assert legs is not None and legs.claimed > 0
    assert cluster.workers[2].counters.generation_tokens - before == legs.ended["done"]  # type: ignore[index]
    await cluster.is_clean()


class Endless:
    """A stream that lasts longer than any test; what has come of it can be compared."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._text: list[str] = []
        self._task = asyncio.create_task(self._read(name))

    async def _read(self, name: str) -> None:
        body = {"model": "mock", "prompt": name * 40, "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        async with self._cluster.client.session.post(self._cluster.url + COMPLETION, json=body) as reply:
            assert reply.status == 200
            async for line in reply.content:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    self._text.append(event["choices"][0]["text"])

    async def goes_on(self, events: int = 20) -> None:
        """Until so many further events have come."""
        wanted = len(self._text) + events
        await self._cluster.see(lambda: len(self._text) >= wanted or self._task.done(), "it goes on")
        assert not self._task.done(), self._task.exception()

    async def end(self) -> None:
        """Leave it, and check all that has come."""
        await self.goes_on()
        await end_tasks((self._task,))
        assert self._cluster.right(30_000).startswith("".join(self._text))


async def test_running_streams_go_on_elsewhere_and_that_is_nobodys_failure(start: StartCluster) -> None:
    cluster = await start(DECODE, DECODE, PREFILL, settings={"retry_floor": 0.0, "retry_ratio": 0.0}, speed=0.5)
    streams = [Endless(cluster, f"s{n} ") for n in range(4)]
    for stream in streams:
        await stream.goes_on()
    here = cluster.running(1)
    move = await cluster.move(1, PREFILL, timeout_s=20.0)
    assert move.state is MoveState.DONE, move
    assert here and cluster.metric("handed_over_streams_total", outcome="failed") == 0
    assert not cluster.running(1)
    await cluster.see(lambda: cluster.running(0) == 4, "the other one has them all")
    for stream in streams:
        await stream.end()
    assert cluster.router.directory.get(cluster.id(1)).breaker is CLOSED  # type: ignore[arg-type, union-attr]
    await cluster.is_clean()


@pytest.mark.slow
async def test_a_stream_may_be_handed_over_more_often_than_continued_after_a_loss(start: StartCluster) -> None:
    cluster = await start(DECODE, DECODE, PREFILL, settings={"continue_streams": 1}, speed=0.5)
    stream = Endless(cluster, "s ")
    for _ in range(2):
        await stream.goes_on()
        number = 0 if cluster.running(0) else 1
        assert (await cluster.move(number, PREFILL, timeout_s=16.0)).state is MoveState.DONE
        await stream.goes_on()
        assert not cluster.running(number)
        assert (await cluster.move(number, DECODE)).state is MoveState.DONE
        await cluster.see(lambda n=number: cluster.router.directory.get(cluster.id(n)).decodes, "the router knows")  # type: ignore[misc, arg-type, union-attr]
    await stream.end()


async def test_a_move_that_cannot_finish_is_undone_and_the_worker_serves_as_before(start: StartCluster) -> None:
    cluster = await start(DECODE, DECODE, PREFILL)
    # With a seed nobody else can go on exactly.
    streams = [asyncio.create_task(cluster.stream(f"s{n}", 3000, seed=1)) for n in range(6)]
    await cluster.see(lambda: cluster.running(1), "it has streams")
    move = await cluster.move(1, PREFILL, timeout_s=2.0)
    assert move.state is MoveState.UNDONE and "requests" in move.detail, move
    assert (await cluster.record(1)).role is DECODE
    assert set(await asyncio.gather(*streams)) == {cluster.right(3000)}
    await cluster.see(lambda: cluster.router.directory.get(cluster.id(1)).decodes, "the router knows")  # type: ignore[arg-type, union-attr]
    before = cluster.workers[1].counters.requests
    await asyncio.gather(*(cluster.stream(f"again{n}", 50) for n in range(8)))
    assert cluster.workers[1].counters.requests > before
    # Its own wish is gone, so that it counts as one who stays.
    for _ in range(100):
        if await cluster.roles.of((await cluster.record(1)).pool.id, (await cluster.record(1)).id) is None:
            break
        await asyncio.sleep(0.1)
    assert (await cluster.move(0, PREFILL)).state is MoveState.DONE


async def test_a_wish_that_is_taken_back_ends_the_move_at_once(start: StartCluster) -> None:
    cluster = await start(DECODE, DECODE, PREFILL)
    streams = [asyncio.create_task(cluster.stream(f"s{n}", 3000, seed=1)) for n in range(6)]
    await cluster.see(lambda: cluster.running(1), "it has streams")
    asked = await cluster.ask(1, PREFILL, timeout_s=600.0)
    assert asked.record is not None and asked.wish is not None
    await cluster.drains(1)
    assert await take_back(cluster.roles, asked.record, asked.wish)
    moved = await wait_for_move(cluster.registry, asked.record, asked.wish)
    assert not moved.done and "taken back" in moved.detail
    assert set(await asyncio.gather(*streams)) == {cluster.right(3000)}


async def test_of_two_askers_at_once_the_last_one_is_obeyed(start: StartCluster) -> None:
    cluster = await start(BOTH, BOTH, BOTH)
    stream = asyncio.create_task(cluster.stream("s", 2000, seed=1))
    await cluster.see(lambda: sum(map(cluster.running, range(3))) == 1, "it runs")
    number = next(n for n in range(3) if cluster.running(n))
    first = await cluster.ask(number, PREFILL, timeout_s=600.0, by=PLANNER)
    await cluster.drains(number)
    again = await cluster.ask(number, PREFILL, by=PLANNER)
    assert again.verdict is Verdict.ALREADY
    move = await cluster.move(number, DECODE)
    assert (move.state, move.to, move.by) == (MoveState.DONE, DECODE, "operator")
    assert first.ok
    # By hand: planners leave it alone until that is taken back.
    assert is_held(await cluster.record(number))
    assert (await cluster.ask(number, BOTH, by=PLANNER)).verdict is Verdict.HELD
    assert (await cluster.ask(number, None)).ok
    for _ in range(100):
        if not is_held(await cluster.record(number)):
            break
        await asyncio.sleep(0.1)
    assert (await cluster.ask(number, BOTH, by=PLANNER)).verdict is Verdict.ASKED
    assert await stream == cluster.right(2000)


async def test_the_last_of_a_kind_stays_unless_forced_and_serves_while_it_drains(start: StartCluster) -> None:
    cluster = await start(PREFILL, DECODE)
    assert (await cluster.ask(1, PREFILL)).verdict is Verdict.LAST
    assert (await cluster.ask(0, DECODE)).verdict is Verdict.LAST
    stream = asyncio.create_task(cluster.stream("s", 1500, seed=1))
    await cluster.see(lambda: cluster.running(1) == 1, "it runs")
    assert (await cluster.move(0, BOTH)).state is MoveState.DONE
    assert (await cluster.ask(1, PREFILL, timeout_s=600.0)).ok, "another one decodes now"
    await cluster.drains(1)
    assert await cluster.stream("meanwhile", 20) == cluster.right(20)
    assert await stream == cluster.right(1500)


async def test_the_last_decoder_that_was_forced_away_serves_until_it_is_gone(start: StartCluster) -> None:
    cluster = await start(PREFILL, DECODE)
    stream = asyncio.create_task(cluster.stream("s", 2000, seed=1))
    await cluster.see(lambda: cluster.running(1) == 1, "it runs")
    assert (await cluster.ask(1, PREFILL, timeout_s=600.0, force=True)).ok
    await cluster.drains(1)
    assert await cluster.stream("meanwhile", 20) == cluster.right(20)
    assert await stream == cluster.right(2000)


async def test_of_two_at_once_who_take_the_last_two_away_one_is_refused(start: StartCluster) -> None:
    cluster = await start(PREFILL, DECODE, DECODE)
    one, two = await asyncio.gather(cluster.ask(1, PREFILL), cluster.ask(2, PREFILL))
    assert {one.verdict, two.verdict} == {Verdict.ASKED, Verdict.LAST}


async def test_prefill_jobs_go_to_others_when_their_worker_does_something_else(start: StartCluster) -> None:
    cluster = await start(PREFILL, PREFILL, DECODE, speed=0.3, prefill_budget_tokens=400)
    streams = [asyncio.create_task(cluster.stream(f"s{n}", 3)) for n in range(24)]
    stats = cluster.workers[1].prefill_stats
    assert stats is not None
    await cluster.see(lambda: stats.claimed > 1, "it has jobs")
    move = await cluster.move(1, DECODE)
    assert move.state is MoveState.DONE, move
    assert stats.tokens == 0
    assert set(await asyncio.gather(*streams)) == {cluster.right(3)}
    await cluster.is_clean()


async def test_a_store_that_loses_everything_in_mid_move_does_not_end_it(start: StartCluster) -> None:
    cluster = await start(DECODE, DECODE, PREFILL, lease_s=5.0, speed=1.0)
    streams = [asyncio.create_task(cluster.stream(f"s{n}", 800, seed=1)) for n in range(4)]
    await cluster.see(lambda: cluster.running(1), "it has streams")
    asked = await cluster.ask(1, PREFILL, timeout_s=300.0)
    await cluster.drains(1)
    memory = memory_store(cluster.router._settings.store)
    assert memory is not None
    memory.clear()
    assert asked.record is not None and asked.wish is not None
    moved = await wait_for_move(cluster.registry, asked.record, asked.wish)
    assert moved.done, moved.detail
    assert set(await asyncio.gather(*streams)) == {cluster.right(800)}


async def test_a_worker_that_dies_in_mid_move_costs_nobody_an_answer(start: StartCluster) -> None:
    cluster = await start(DECODE, DECODE, PREFILL, lease_s=5.0, speed=1.0)
    streams = [asyncio.create_task(cluster.stream(f"s{n}", 800)) for n in range(4)]
    await cluster.see(lambda: cluster.running(1), "it has streams")
    asked = await cluster.ask(1, PREFILL, timeout_s=100.0)
    await cluster.drains(1)
    await cluster.client.post(f"{cluster.workers[1].url}/mock/faults", {"die": True})
    assert set(await asyncio.gather(*streams)) == {cluster.right(800)}
    assert asked.ok


async def test_a_store_that_is_away_in_mid_move_hears_of_its_end_when_it_is_back(start: StartCluster) -> None:
    with EmbeddedStore() as store:
        cluster = await start(DECODE, DECODE, PREFILL, store=store.url, lease_s=5.0, speed=1.0)
        streams = [asyncio.create_task(cluster.stream(f"s{n}", 800, seed=1)) for n in range(4)]
        await cluster.see(lambda: cluster.running(1), "it has streams")
        asked = await cluster.ask(1, PREFILL, timeout_s=300.0)
        assert asked.ok, asked.detail
        await cluster.drains(1)
        await asyncio.to_thread(store.kill)
        assert set(await asyncio.gather(*streams)) == {cluster.right(800)}
        await cluster.see(lambda: cluster.workers[1].role is PREFILL, "it moves by its own clock")
        assert await cluster.stream("meanwhile", 20) == cluster.right(20)
        await asyncio.to_thread(store.start)
        assert asked.record is not None and asked.wish is not None
        assert (await wait_for_move(cluster.registry, asked.record, asked.wish)).done
        await cluster.see(lambda: cluster.router.directory.get(cluster.id(1)).role is PREFILL, "the router knows")  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("early", [True, False])
async def test_whoever_asked_may_be_killed(start: StartCluster, early: bool) -> None:
    with EmbeddedStore() as store:
        cluster = await start(DECODE, DECODE, PREFILL, store=store.url)
        command = (
            sys.executable,
            "-m",
            "vllm_pd.cli",
            "role",
            cluster.id(1),
            "prefill",
            "--wait",
            "--store",
            store.url,
        )
        asker = await asyncio.create_subprocess_exec(
            *command, "--namespace", "n", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            if early:
                assert asker.stdout is not None
                # It says so when the wish is in the store.
                assert b"was asked" in await asyncio.wait_for(asker.stdout.readline(), LONG_S)
            else:
                await cluster.drains(1)
        finally:
            asker.send_signal(signal.SIGKILL)
            await asker.wait()
        await cluster.see(lambda: cluster.workers[1].role is PREFILL, "it moves all the same")


async def test_the_routers_endpoint_shows_and_changes_roles(start: StartCluster) -> None:
    cluster = await start(PREFILL, DECODE, DECODE)
    url = f"{cluster.url}/v1/roles"
    status, page = await cluster.client.get(url)
    assert status == 200 and page.count('"role":"decode"') == 2
    status, said = await cluster.client.post(url, {"worker": cluster.id(2), "role": "prefill", "wait": True})
    assert status == 200 and said["done"] and said["move"]["to"] == "prefill", said
    assert (await cluster.client.post(url, {"worker": cluster.id(2), "role": "prefill"}))[0] == 200
    assert (await cluster.client.post(url, {"worker": cluster.id(1), "role": "prefill"}))[0] == 409
    assert (await cluster.client.post(url, {"worker": "nobody:1", "role": "prefill"}))[0] == 404
    status, said = await cluster.client.post(url, {"worker": cluster.id(1), "role": "prefil"})
    assert status == 400 and "did you mean" in said["error"]["message"]
    assert (await cluster.client.post(url, {"worker": cluster.id(1), "rolle": "prefill"}))[0] == 400


@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [
        ({"role_moves": "off"}, "", 403),
        ({"api_key": "k"}, "", 401),
        ({"api_key": "k"}, "k", 202),
    ],
)
async def test_the_endpoint_is_guarded(start: StartCluster, settings: dict[str, Any], key: str, status: int) -> None:
    cluster = await start(PREFILL, DECODE, DECODE, settings=settings)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"worker": cluster.id(1), "role": "prefill"}
    assert (await cluster.client.post(f"{cluster.url}/v1/roles", body, **headers))[0] == status
