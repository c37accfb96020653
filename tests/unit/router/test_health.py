"""Workers that stop, engines that get stuck, requests that get lost: what the router notices, and what clients see."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

import pytest
from aiohttp import web

from tests.unit.router.conftest import LONG, Cluster, StartCluster, StartWorker, until
from tests.unit.router.fake_worker import FakeWorker, Seen, hang
from tests.unit.router.test_directory import state
from vllm_pd.background import end_tasks
from vllm_pd.router import signs_of_life
from vllm_pd.router.breaker import Circuit, Trouble
from vllm_pd.router.directory import Directory
from vllm_pd.router.health import HealthWatch
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.transport import WorkerDown
from vllm_pd.router.watched_legs import Legs, always
from vllm_pd.router.worker import Source, Worker
from vllm_pd.state import Role

WHOLE = json.dumps({"prompt": LONG, "n": 2}).encode()
STREAM = json.dumps({"prompt": LONG, "max_tokens": 20, "stream": True, "n": 2}).encode()
SPLIT = json.dumps({"prompt": LONG, "max_tokens": 20}).encode()
SOON = 0.5


def stop(worker: FakeWorker) -> None:
    """As SIGSTOP does: connections are taken, nothing is answered."""
    worker.frozen = True
    worker.hook = hang


def go_on(worker: FakeWorker) -> None:
    worker.frozen = False
    worker.hook = None


def prefills(worker: FakeWorker) -> int:
    """Prefill legs that it got. Afterwards it is also told of blocks that nobody will read."""
    return sum("do_remote_decode" in seen.json.get("kv_transfer_params", ()) for seen in worker.posts)


def known(cluster: Cluster, worker: FakeWorker) -> Worker:
    return next(w for w in cluster.service.directory.workers if w.id == worker.host_port)


async def two(
    start_cluster: StartCluster, start_worker: StartWorker, **settings: Any
) -> tuple[Cluster, list[FakeWorker]]:
    """Two workers, the second one loaded, so that requests go to the first."""
    cluster = await start_cluster(policy="least-loaded", **{"health_timeout": SOON, **settings})
    workers = [await start_worker(), await start_worker()]
    for worker in workers:
        await cluster.join(worker, Role.BOTH)
    await cluster.load(workers[1], running=9)
    return cluster, workers


async def test_requests_on_a_stopped_worker_go_to_another_and_it_comes_back(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, (first, second) = await two(start_cluster, start_worker)
    stop(first)
    answers = await asyncio.gather(*(cluster.post("/v1/completions", WHOLE) for _ in range(5)))
    assert [code for code, _ in answers] == [200] * 5
    assert len(first.posts) == len(second.posts) == 5
    assert cluster.metric("legs_ended_total", reason="down") == 5
    assert cluster.metric("decode_retry_total", reason="down") == 5
    await until(first.posts[0].cancelled.is_set, "the connection to it was closed")
    # Nobody waits for it any more.
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert len(first.posts) == 5
    page = json.loads((await cluster.get("/ready"))[1])
    assert page["ready"]
    (trouble,) = [worker["trouble"] for worker in page["workers"] if worker["trouble"]]
    assert "gives no sign of life" in trouble
    assert cluster.metric("workers_in_trouble", trouble="down") == 1
    go_on(first)
    await until(lambda: not known(cluster, first).is_broken, "it answers again")
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert len(first.posts) == 6
    assert cluster.metric("workers_in_trouble", trouble="down") == 0


async def test_prefill_on_a_stopped_worker_is_done_by_another_then_by_the_decode_worker(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(policy="least-loaded", health_timeout=SOON, disagg="always")
    first, second, decode = [await start_worker() for _ in range(3)]
    for worker, role in ((first, Role.PREFILL), (second, Role.PREFILL), (decode, Role.DECODE)):
        await cluster.join(worker, role)
    await cluster.load(second, running=9)
    stop(first)
    assert (await cluster.post("/v1/completions", SPLIT))[0] == 200
    assert "kv_transfer_params" in decode.posts[0].json
    stop(second)
    assert (await cluster.post("/v1/completions", SPLIT))[0] == 200
    assert decode.posts[1].raw == SPLIT
    assert (prefills(first), prefills(second)) == (1, 2)
    assert cluster.metric("legs_ended_total", reason="down") == 2
    assert cluster.metric("prefill_fallback_total", reason="down") == 1
    # Both are left out.
    assert (await cluster.post("/v1/completions", SPLIT))[0] == 200
    assert cluster.metric("bypass_total", reason="no_prefill_worker") == 1


async def test_suspected_worker_gets_no_new_requests(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster, (first, second) = await two(start_cluster, start_worker, health_timeout=4.0)
    stop(first)
    asking = asyncio.create_task(cluster.post("/v1/completions", WHOLE))
    await first.arrived.wait()
    await until(lambda: not known(cluster, first).is_usable(asyncio.get_running_loop().time()), "it is late")
    assert not known(cluster, first).is_broken
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert (len(first.posts), len(second.posts)) == (1, 1)
    go_on(first)
    asking.cancel()


async def test_long_answer_of_a_living_worker_is_waited_for(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, (first, second) = await two(start_cluster, start_worker)

    async def slow(request: web.Request, seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(5 * SOON)
        return await first.answer(request, seen)

    first.hook = slow
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert (len(first.posts), len(second.posts)) == (1, 0)
    assert not known(cluster, first).is_broken


async def test_the_only_worker_is_waited_for_while_it_may_come_back(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(health_timeout=SOON)
    worker = await start_worker()
    await cluster.join(worker, Role.BOTH)
    resume = asyncio.Event()

    async def stopped(request: web.Request, seen: Seen) -> web.StreamResponse:
        await resume.wait()
        return await worker.answer(request, seen)

    worker.frozen, worker.hook = True, stopped
    asking = asyncio.create_task(cluster.post("/v1/completions", WHOLE))
    await until(lambda: known(cluster, worker).breaker.circuit is Circuit.OPEN, "it was found down")
    code, answer = await cluster.get("/ready")
    assert code == 503
    assert "gives no sign of life" in json.loads(answer)["reason"]
    worker.frozen = False
    resume.set()
    assert (await asking)[0] == 200
    await until(lambda: not known(cluster, worker).is_broken, "it answers again")


async def test_the_only_worker_is_not_waited_for_for_ever(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(health_timeout=SOON, down_timeout=SOON)
    worker = await start_worker()
    await cluster.join(worker, Role.BOTH)
    stop(worker)
    code, answer = await cluster.post("/v1/completions", WHOLE)
    assert code == 504
    message = json.loads(answer)["error"]["message"]
    assert f"Worker {worker.host_port} was given up before its first byte" in message
    assert "not even from /health" in message
    assert cluster.inflight() == 0


async def test_stream_of_a_stopped_worker_ends_with_an_error_event_that_names_it(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, (first, _) = await two(start_cluster, start_worker, down_timeout=SOON)
    first.gate = asyncio.Event()
    async with cluster.client.post(cluster.url + "/v1/completions", data=STREAM) as reply:
        assert await reply.content.readany() == b'data: {"n":1}\n\n'
        stop(first)
        rest = await reply.content.read()
    error = json.loads(rest.strip().removeprefix(b"data: "))["error"]
    assert first.host_port in error["message"]
    assert "gives no sign of life" in error["message"]


async def test_worker_whose_engine_is_dead_by_its_own_word_is_left_at_once(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, (first, second) = await two(start_cluster, start_worker, health_timeout=60.0)
    first.healthy, first.hook = False, hang
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert (len(first.posts), len(second.posts)) == (1, 1)
    assert "/health answers with status 503" in known(cluster, first).breaker.cause


async def test_stuck_engine_behind_a_living_server_is_left(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, (first, second) = await two(start_cluster, start_worker, stuck_timeout=SOON)
    await cluster.load(first, running=1)
    first.hook = hang
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert (len(first.posts), len(second.posts)) == (1, 1)
    assert cluster.metric("legs_ended_total", reason="stuck") == 1
    assert "made no step" in known(cluster, first).breaker.cause


async def test_engine_whose_load_report_moves_is_not_stuck(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, (first, second) = await two(start_cluster, start_worker, stuck_timeout=SOON)
    await cluster.load(first, running=1)

    async def prefilling(request: web.Request, seen: Seen) -> web.StreamResponse:
        for step in range(8):
            await cluster.load(first, running=1, at_ms=step + 2)
            await asyncio.sleep(SOON / 3)
        return await first.answer(request, seen)

    first.hook = prefilling
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert (len(first.posts), len(second.posts)) == (1, 0)


async def test_request_that_its_engine_does_not_have_is_sent_to_another_worker(
    start_cluster: StartCluster, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signs_of_life, "SETTLE_S", 0.1)
    cluster, (first, second) = await two(start_cluster, start_worker, stuck_timeout=SOON)
    await cluster.load(first)
    first.hook = hang
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert (len(first.posts), len(second.posts)) == (1, 1)
    assert cluster.metric("legs_ended_total", reason="lost") == 1
    # Others may be well there.
    assert known(cluster, first).breaker.circuit is Circuit.CLOSED


async def test_worker_that_withdraws_finishes_what_it_has(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, (first, second) = await two(start_cluster, start_worker, stuck_timeout=SOON)
    await cluster.load(first, running=1)
    finish = asyncio.Event()

    async def draining(request: web.Request, seen: Seen) -> web.StreamResponse:
        await finish.wait()
        return await first.answer(request, seen)

    first.hook = draining
    asking = asyncio.create_task(cluster.post("/v1/completions", WHOLE))
    await first.arrived.wait()
    record = known(cluster, first).record
    await cluster.registry.withdraw(record.id, record.pool.id, record.epoch)
    await until(lambda: len(cluster.service.directory.workers) == 1, "it has withdrawn")
    first.healthy = True
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    # By now an engine that is there would count as stuck.
    await asyncio.sleep(3 * SOON)
    finish.set()
    assert (await asking)[0] == 200
    assert (len(first.posts), len(second.posts)) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_leaves_and_then_says_nothing_more_is_not_waited_for(
    start_cluster: StartCluster, start_worker: StartWorker, stream: bool
) -> None:
    # As vLLM ends without a time to drain: its engine is gone, and its server waits for connections to be closed.
    # A machine so slow that it is not even refused in that time must not decide what is said.
    slow = {"health_timeout": 8 * SOON}
    cluster, (first, second) = await two(start_cluster, start_worker, stuck_timeout=SOON, down_timeout=2 * SOON, **slow)
    first.gate = asyncio.Event()
    if not stream:
        first.hook = hang
    asking = asyncio.create_task(cluster.post("/v1/completions", STREAM if stream else WHOLE))
    await first.arrived.wait()
    await first.refuse()
    record = known(cluster, first).record
    await cluster.registry.withdraw(record.id, record.pool.id, record.epoch)
    status, body = await asking
    assert status == 200
    if stream:
        # With n=2 it cannot go on elsewhere.
        assert b"takes no connections" in body
    else:
        assert len(second.posts) == 1
    assert cluster.metric("legs_ended_total", reason="down") == 1


async def test_refusing_worker_is_used_again_once_it_answers_health(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, (first, _) = await two(start_cluster, start_worker)
    await first.stop()
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert known(cluster, first).is_broken
    await first.start()
    await until(lambda: not known(cluster, first).is_broken, "it takes connections again")
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert len(first.posts) == 1


class SilentUpstream:
    """Takes every request and answers none."""

    async def open(self, *args: Any, **options: Any) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        pass


async def test_what_this_router_missed_while_it_was_stopped_is_held_against_nobody() -> None:
    now = [1000.0]

    def clock() -> float:
        return now[0]

    directory, legs = Directory(clock, store_configured=True), Legs(clock)
    directory.store_up()
    directory.replace(Source.STORE, [state("a", running=1, at=1), state("b")])
    worker = directory.workers[0]
    leg = legs.begin(worker, 0, always)
    leg.wait.since = clock()
    watch = HealthWatch(RouterSettings(), directory, legs, SilentUpstream(), RouterMetrics(directory), clock)
    await watch.look()
    # Stopped for twenty seconds.
    now[0] += 20.0
    await watch.look()
    assert leg.wait.error is None
    assert worker.is_usable(clock())
    # From now on it counts: nothing comes, and /health is not answered either.
    for _ in range(24):
        now[0] += 0.25
        await watch.look()
        for seen in watch._seen.values():
            seen.missed = 1
    assert isinstance(leg.wait.error, WorkerDown)
    assert worker.breaker.trouble is Trouble.DOWN
    # A byte of another answer shows that it is back.
    other = legs.begin(worker, 0, always)
    other.begun, other.wait.since = True, clock() + 0.1
    now[0] += 0.25
    await watch.look()
    assert other.wait.error is None
    assert worker.is_usable(clock() + 60.0)
    await end_tasks([seen.probe for seen in watch._seen.values() if seen.probe is not None])


async def test_a_store_that_was_away_makes_no_engine_look_stuck() -> None:
    now = [1000.0]

    def clock() -> float:
        return now[0]

    directory, legs = Directory(clock, store_configured=True), Legs(clock)
    directory.store_up()
    directory.replace(Source.STORE, [state("a", running=1, at=1), state("b")])
    worker = directory.workers[0]
    leg = legs.begin(worker, 0, always)
    settings = RouterSettings()
    watch = HealthWatch(settings, directory, legs, SilentUpstream(), RouterMetrics(directory), clock)

    async def pass_by(seconds: float) -> None:
        for _ in range(int(seconds / 0.25)):
            now[0] += 0.25
            # Its process answers /health, so only load reports tell about its engine.
            for seen in watch._seen.values():
                seen.sign = now[0]
            leg.wait.since = 1000.0
            await watch.look()

    directory.store_down("paused")
    await pass_by(30.0)
    directory.replace(Source.STORE, [state("a", running=1, at=1), state("b")], after_outage=directory.store_up())
    await pass_by(settings.stuck_timeout - 1)
    assert not worker.is_broken
    await pass_by(2.0)
    assert worker.breaker.trouble is Trouble.STUCK
    assert isinstance(leg.wait.error, WorkerDown)
    # Its next step shows that it computes; one request at a time may try.
    directory.replace(Source.STORE, [state("a", running=1, at=2), state("b")])
    await pass_by(0.5)
    assert worker.breaker.circuit is Circuit.HALF_OPEN
