"""The prefill jobs of a worker: a real store, real HTTP to a server that answers as it is told."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.conformance.registry import worker
from tests.unit.agent.own_server import OK, StubServer, answering, own_server, until
from tests.unit.agent.test_prefill_rules import Clock
from vllm_pd.agent.prefill_progress import EngineProgress
from vllm_pd.agent.prefill_rules import How
from vllm_pd.agent.prefill_runner import PrefillRunner
from vllm_pd.agent.spec import PrefillSpec
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state.base import Epoch, WorkerId
from vllm_pd.state.prefill_payload import PrefillAnswer, PrefillRequest, decode_answer, encode_request
from vllm_pd.state.prefill_queue import Claimant, JobId, JobResult, PrefillJob, QueueLimits
from vllm_pd.state.redis_prefill_queue import RedisPrefillQueue

DEADLINE_S = 60.0
ROUTER = "router-1"
RECORD = worker()
POOL = RECORD.pool.id
OTHER = dataclasses.replace(RECORD, id=WorkerId("10.0.0.99:8000"), url="http://10.0.0.99:8000")
QUIET = QueueLimits(visibility_ms=60_000, patience_ms=0)
"""Jobs do not move by themselves while a test looks."""
BRISK = QueueLimits(visibility_ms=3000, patience_ms=0)
BUDGET = 1000


class Bench:
    """A store, the router's side of the queue, and the workers that a test starts."""

    def __init__(self, store: EmbeddedStore, limits: QueueLimits, stack: AsyncExitStack) -> None:
        self.store = store
        self.limits = limits
        self._stack = stack
        self._queues: list[RedisPrefillQueue] = []
        self._runners: list[PrefillRunner] = []
        self.results: dict[str, JobResult] = {}
        self.timeout_s = 10.0
        self.queue = self.open_queue()

    def open_queue(self) -> RedisPrefillQueue:
        queue = RedisPrefillQueue(self.store.url, "test", limits=self.limits, timeout_s=self.timeout_s)
        self._queues.append(queue)
        return queue

    async def worker(
        self, record: Any = RECORD, *, progress: EngineProgress | None = None, started: bool = True, **changes: Any
    ) -> tuple[PrefillRunner, StubServer]:
        stub = await self._stack.enter_async_context(own_server())
        spec = PrefillSpec(
            open_queue=self.open_queue, server=stub.server, **({"budget_tokens": BUDGET, "api_key": "own"} | changes)
        )
        progress = progress or EngineProgress(known=False)
        runner = PrefillRunner(record, spec, self.open_queue(), progress, self.limits)
        self._runners.append(runner)
        if started:
            runner.start()
            runner.allow(True)
        return runner, stub

    async def put(self, name: str, tokens: int = 100, worker: WorkerId | None = None, **changes: Any) -> None:
        asked = {
            "path": "/v1/completions",
            "headers": [("X-Request-Id", f"{name}-prefill")],
            "body": b'{"prompt":"' + name.encode() + b'"}',
            "deadline_ms": time.time_ns() // 1_000_000 + 60_000,
            "timeout_ms": 60_000,
        }
        payload = changes.pop("payload", None) or encode_request(PrefillRequest(**(asked | changes)))
        job = PrefillJob(JobId(name), tokens, payload, worker, 0, ROUTER)
        assert await self.queue.put(POOL, job, 60_000)

    async def result(self, name: str) -> JobResult:
        async with asyncio.timeout(DEADLINE_S):
            while name not in self.results:
                self.results |= dict(await self.queue.results(POOL, ROUTER, 500))
        return self.results[name]

    async def answer(self, name: str) -> PrefillAnswer:
        result = await self.result(name)
        assert not result.error
        return decode_answer(result.data)

    async def waiting(self, worker: WorkerId | None = None) -> int:
        return (await self.queue.depth(POOL, [worker] if worker else []))[worker].waiting

    async def close(self) -> None:
        for runner in self._runners:
            await runner.close()
        for queue in self._queues:
            await queue.close()


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@pytest.fixture(params=[QUIET], ids=[""])
async def bench(store: EmbeddedStore, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        bench = Bench(store, request.param, stack)
        await bench.queue.announce_router(POOL, ROUTER, 600_000)
        yield bench
        await bench.close()


brisk = pytest.mark.parametrize("bench", [BRISK], indirect=True, ids=[""])
"""For what happens when a worker is silent."""


async def test_a_job_is_done_by_the_own_server_with_its_own_key_and_acknowledged(bench: Bench) -> None:
    runner, stub = await bench.worker()
    headers = [("X-Request-Id", "one-prefill"), ("Authorization", "Bearer client"), ("X-data-parallel-rank", "1")]
    await bench.put("one", headers=headers)
    answer = await bench.answer("one")
    assert (answer.status, answer.body) == (200, OK)
    assert answer.computed_ms >= 0
    assert bench.results["one"].worker == RECORD.id
    ((target, sent, body),) = stub.asked
    assert (target, body) == ("/v1/completions", b'{"prompt":"one"}')
    assert (sent["x-request-id"], sent["authorization"]) == ("one-prefill", "Bearer own")
    # The rank was for the worker that the router had in mind, and that is none in the shared stream.
    assert "x-data-parallel-rank" not in sent
    await bench.put("two", worker=RECORD.id, headers=headers)
    await bench.result("two")
    assert stub.asked[1][1]["x-data-parallel-rank"] == "1"
    await until(lambda: runner.stats.ended[How.DONE] == 2)
    assert (runner.stats.claimed, runner.stats.stolen, runner.stats.tokens) == (2, 0, 0)


async def test_a_clients_mistake_is_a_result_and_no_failed_attempt(bench: Bench) -> None:
    _, stub = await bench.worker()
    stub.answer = answering(400, b'{"error":{"message":"too long"}}')
    await bench.put("one")
    answer = await bench.answer("one")
    assert (answer.status, answer.body) == (400, b'{"error":{"message":"too long"}}')
    assert len(stub.asked) == 1
    assert await bench.queue.dead(POOL) == []


async def test_a_job_that_fails_everywhere_is_a_dead_letter_with_its_error_and_stops_nothing(bench: Bench) -> None:
    runner, stub = await bench.worker()

    async def answer(request: Any) -> Any:
        poison = b"poison" in await request.read()
        return await (answering(500, b"index out of range") if poison else answering())(request)

    stub.answer = answer
    await bench.put("poison")
    await bench.put("good")
    assert (await bench.answer("good")).status == 200
    result = await bench.result("poison")
    assert result.error == "the server of the worker answered 500: index out of range"
    (dead,) = await bench.queue.dead(POOL)
    assert (dead.id, dead.attempts, dead.error) == ("poison", 3, result.error)
    await until(lambda: runner.stats.ended[How.FAILED] == 3)


async def test_a_job_that_cannot_be_read_is_a_dead_letter_and_stops_nothing(bench: Bench) -> None:
    _, stub = await bench.worker()
    await bench.put("garbage", payload=b"\xc1 no job")
    await bench.put("good")
    assert (await bench.answer("good")).status == 200
    assert "router and worker differ in their version" in (await bench.result("garbage")).error
    assert [body for _, _, body in stub.asked] == [b'{"prompt":"good"}']


async def test_a_cancelled_job_is_given_up_by_the_server_at_once(bench: Bench) -> None:
    runner, stub = await bench.worker()
    stub.answer = stub.hold
    await bench.put("one")
    await bench.put("two")
    await until(lambda: stub.open == 2)
    assert await bench.queue.cancel(POOL, JobId("one"))
    await until(lambda: stub.given_up == 1)
    await until(lambda: runner.stats.ended[How.LOST] == 1)
    assert runner.stats.tokens == 100
    # What else it does goes on.
    stub.may_end.set()
    assert (await bench.answer("two")).status == 200


KEPT = b'{"prompt":"one","kv_transfer_params":{"pd_hold":"key-1"}}'


def releases(stub: StubServer) -> list[tuple[str, str | None]]:
    """Key and rank of each release that the server was asked for."""
    found = []
    for _, headers, body in stub.asked:
        params = json.loads(body).get("kv_transfer_params", {})
        found += [(key, headers.get("x-data-parallel-rank")) for key in params.get("pd_release", ())]
    return found


async def test_blocks_of_a_job_that_was_cancelled_are_let_go(bench: Bench) -> None:
    _, stub = await bench.worker(dataclasses.replace(RECORD, dp_size=1))
    stub.answer = stub.hold
    await bench.put("one", body=KEPT)
    await until(lambda: stub.open == 1)
    stub.answer = answering()
    assert await bench.queue.cancel(POOL, JobId("one"))
    # The engine may have done it at that very moment.
    await until(lambda: releases(stub) == [("key-1", None)])
    assert stub.asked[1][1]["authorization"] == "Bearer own"


async def test_blocks_of_a_job_that_was_cancelled_as_it_was_done_are_let_go_by_every_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, stub = await bench.worker(dataclasses.replace(RECORD, dp_size=2))
    named = asyncio.Event()
    original = runner._queue.cancelled

    async def late(*args: Any, **kwargs: Any) -> Any:
        ids = await original(*args, **kwargs)
        await named.wait()
        return ids

    monkeypatch.setattr(runner._queue, "cancelled", late)
    stub.answer = stub.hold
    # The call that is under way is not the one that is held up.
    await bench.put("first")
    await until(lambda: stub.open == 1)
    assert await bench.queue.cancel(POOL, JobId("first"))
    await until(lambda: stub.given_up == 1)
    await bench.put("one", body=KEPT)
    await until(lambda: stub.open == 1)
    assert await bench.queue.cancel(POOL, JobId("one"))
    stub.may_end.set()
    await until(lambda: runner.stats.unheard == 1)
    assert releases(stub) == []
    named.set()
    await until(lambda: releases(stub) == [("key-1", "0"), ("key-1", "1")])


@brisk
async def test_blocks_of_a_job_that_may_come_back_are_not_let_go(bench: Bench) -> None:
    """Its key counts for the next attempt, too."""
    runner, stub = await bench.worker()
    stub.answer = stub.hold
    await bench.put("one", body=KEPT)
    await until(lambda: stub.open == 1)
    assert await bench.queue.rehome(POOL, RECORD.id) == 1
    await until(lambda: len(stub.asked) == 2)
    stub.may_end.set()
    assert (await bench.answer("one")).status == 200
    await until(lambda: not runner._jobs)
    assert releases(stub) == []


async def test_jobs_are_claimed_up_to_the_budget_and_one_of_any_size_by_an_empty_worker(bench: Bench) -> None:
    runner, stub = await bench.worker()
    stub.answer = stub.hold
    await bench.put("huge", tokens=5 * BUDGET)
    await until(lambda: stub.open == 1)
    for i in range(4):
        await bench.put(f"job{i}", tokens=400)
    await asyncio.sleep(0.3)
    assert (stub.open, await bench.waiting()) == (1, 4)
    stub.may_end.set()
    await bench.result("huge")
    stub.may_end.clear()
    # Whatever had begun before the event was cleared has ended too; two of the rest fit.
    left = 5 - len(stub.asked)
    for i in range(4, 4 + left):
        await bench.put(f"job{i}", tokens=400)
    await until(lambda: stub.open == 2)
    await asyncio.sleep(0.3)
    assert (stub.open, runner.stats.tokens) == (2, 800)


async def test_an_idle_worker_takes_from_the_stream_of_a_loaded_one(bench: Bench) -> None:
    _, loaded = await bench.worker()
    loaded.answer = loaded.hold
    await bench.put("running", tokens=2 * BUDGET, worker=RECORD.id)
    await until(lambda: loaded.open == 1)
    await bench.put("waiting", worker=RECORD.id, headers=[("X-data-parallel-rank", "1")])
    thief, idle = await bench.worker(OTHER)
    await bench.result("waiting")
    assert bench.results["waiting"].worker == OTHER.id
    assert (thief.stats.claimed, thief.stats.stolen) == (1, 1)
    assert "x-data-parallel-rank" not in idle.asked[0][1]


@pytest.mark.parametrize("bench", [QueueLimits(visibility_ms=60_000, patience_ms=60_000)], indirect=True, ids=[""])
async def test_a_worker_that_is_free_keeps_its_own_jobs(bench: Bench) -> None:
    mine, _ = await bench.worker()
    other, _ = await bench.worker(OTHER)
    for i in range(20):
        await bench.put(f"job{i}", worker=RECORD.id)
        await bench.result(f"job{i}")
    assert (mine.stats.claimed, other.stats.stolen) == (20, 0)


async def test_an_overloaded_server_gives_its_jobs_back_and_others_do_them(bench: Bench) -> None:
    busy, stub = await bench.worker()
    stub.answer = answering(503, headers={"Retry-After": "5"})
    await bench.put("one")
    await until(lambda: busy.stats.ended[How.RETURNED])
    other, _ = await bench.worker(OTHER)
    assert (await bench.answer("one")).status == 200
    assert (len(stub.asked), other.stats.claimed) == (1, 1)


@pytest.mark.parametrize("bench", [QueueLimits(visibility_ms=60_000, patience_ms=60_000)], indirect=True, ids=[""])
async def test_a_worker_that_is_broken_does_not_eat_the_jobs_of_others(bench: Bench) -> None:
    broken, stub = await bench.worker()
    stub.answer = answering(500, b"dead")
    other, _ = await bench.worker(OTHER)
    for i in range(40):
        await bench.put(f"job{i}", tokens=10)
    for i in range(40):
        assert not (await bench.result(f"job{i}")).error
    assert broken.stats.claimed < 20
    await until(lambda: other.stats.ended[How.DONE] == 40)


@brisk
async def test_a_job_lasts_as_long_as_its_engine_gets_on(bench: Bench) -> None:
    clock = Clock()
    progress = EngineProgress(clock=clock)
    _, stub = await bench.worker(progress=progress)
    stub.answer = stub.hold
    await bench.put("long")
    deadline = time.monotonic() + 2 * BRISK.visibility_ms / 1000
    while time.monotonic() < deadline:
        clock.now += 1.0
        progress.note(1)
        assert await bench.queue.reclaim(POOL, None) == 0
        await asyncio.sleep(0.05)
    stub.may_end.set()
    assert (await bench.answer("long")).status == 200
    assert (len(stub.asked), stub.given_up) == (1, 0)


@brisk
async def test_an_engine_that_stopped_loses_its_jobs_and_gets_none_until_it_gets_on(bench: Bench) -> None:
    clock = Clock()
    progress = EngineProgress(clock=clock)
    stuck, stub = await bench.worker(progress=progress)
    stub.answer = stub.hold
    await bench.put("one")
    await until(lambda: stub.open == 1)
    clock.now += 61.0
    other, _ = await bench.worker(OTHER)
    assert (await bench.answer("one")).status == 200
    assert bench.results["one"].worker == OTHER.id
    await until(lambda: stub.given_up == 1)
    other.leave()
    await other.drain(0.0)
    await bench.put("two", worker=RECORD.id)
    await asyncio.sleep(0.5)
    # A claim that was under way when the engine was found out gets the job and gives it back.
    assert len(stub.asked) == 1
    assert stuck.stats.ended[How.RETURNED] == stuck.stats.claimed - 1
    stub.may_end.set()
    clock.now += 1.0
    progress.note(0)
    assert (await bench.answer("two")).status == 200


@brisk
async def test_a_worker_that_is_silent_hears_that_its_job_is_anothers(bench: Bench, store: EmbeddedStore) -> None:
    slow, stub = await bench.worker()
    stub.answer = stub.hold
    await bench.put("one")
    await until(lambda: stub.open == 1)
    taken = (await bench.queue.jobs(POOL))[0]
    assert taken.claimant == f"{RECORD.id}@{RECORD.epoch}"
    # As a router does for a worker that is gone; this one only seemed to be.
    slow.leave()
    assert await bench.queue.rehome(POOL, RECORD.id) == 1
    await until(lambda: stub.given_up == 1)
    await until(lambda: slow.stats.ended[How.LOST] == 1)
    other, _ = await bench.worker(OTHER)
    assert (await bench.answer("one")).status == 200
    assert other.stats.claimed == 1


async def test_a_job_goes_on_while_the_store_is_silent_and_is_acknowledged_when_it_is_back(bench: Bench) -> None:
    bench.timeout_s = 0.5
    runner, stub = await bench.worker()
    stub.answer = stub.hold
    await bench.put("one")
    await until(lambda: stub.open == 1)
    bench.store.pause()
    try:
        stub.may_end.set()
        await until(lambda: runner.stats.tokens == 0)
        await asyncio.sleep(1.5)
        assert runner.stats.ended[How.DONE] == 0
    finally:
        bench.store.resume()
    assert (await bench.answer("one")).status == 200
    assert len(stub.asked) == 1
    await bench.put("two")
    assert (await bench.answer("two")).status == 200


async def test_a_result_that_nobody_can_be_told_of_in_time_is_given_up(bench: Bench) -> None:
    bench.timeout_s = 0.5
    runner, stub = await bench.worker()
    stub.answer = stub.hold
    await bench.put("one", timeout_ms=1500)
    await until(lambda: stub.open == 1)
    bench.store.kill()
    stub.may_end.set()
    await until(lambda: runner.stats.unheard == 1)


async def test_jobs_over_their_time_fail_and_say_so(bench: Bench) -> None:
    _, stub = await bench.worker()
    stub.answer = stub.hold
    await bench.put("slow", timeout_ms=200)
    await bench.put("late", deadline_ms=time.time_ns() // 1_000_000 - 60_000)
    assert (await bench.result("slow")).error == "the server of the worker did not answer within 0.2 s"
    assert (await bench.result("late")).error == "its deadline was over before a worker began"


async def test_a_worker_that_leaves_claims_nothing_and_ends_what_it_has(bench: Bench) -> None:
    runner, stub = await bench.worker()
    stub.answer = stub.hold
    await bench.put("running")
    await until(lambda: stub.open == 1)
    runner.leave()
    leaving = asyncio.create_task(runner.drain(DEADLINE_S))
    await asyncio.sleep(0.2)
    await bench.put("late")
    assert not leaving.done()
    stub.may_end.set()
    await asyncio.wait_for(leaving, DEADLINE_S)
    assert (await bench.answer("running")).status == 200
    assert (await bench.waiting(), len(stub.asked)) == (1, 1)


async def test_without_grace_or_after_it_jobs_are_given_back_uncounted(bench: Bench) -> None:
    runner, stub = await bench.worker()
    stub.answer = stub.hold
    await bench.put("one")
    await until(lambda: stub.open == 1)
    runner.leave()
    await runner.drain(0.1)
    (job,) = await bench.queue.jobs(POOL)
    assert (job.claimant, job.attempt) == ("", 0)
    assert (runner.stats.ended[How.RETURNED], runner.stats.unheard) == (1, 0)
    await until(lambda: stub.given_up == 1)
    await bench.worker(OTHER)
    assert (await bench.answer("one")).status == 200


async def test_what_an_earlier_start_had_claimed_is_done_at_once(bench: Bench) -> None:
    earlier = Claimant(RECORD.id, Epoch(RECORD.epoch - 1))
    await bench.put("one", worker=RECORD.id)
    assert await bench.queue.claim(POOL, earlier, fits=-1)
    await bench.worker()
    assert (await bench.answer("one")).status == 200


async def test_a_worker_whose_place_is_anothers_claims_nothing(bench: Bench) -> None:
    runner, stub = await bench.worker(started=False)
    runner.start()
    await bench.put("one")
    await asyncio.sleep(0.3)
    assert (runner.stats.claimed, await bench.waiting()) == (0, 1)
    runner.allow(True)
    await bench.result("one")
    runner.allow(False)
    # A claim that is under way may still take it, and gives it back.
    await bench.put("two")
    await asyncio.sleep(1.0)
    assert (await bench.waiting(), len(stub.asked)) == (1, 1)
    runner.allow(True)
    assert (await bench.answer("two")).status == 200


async def test_an_unforeseen_error_stops_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = await bench.worker(started=False)
    calls = 0
    original = runner._queue.claim

    async def claim(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("unforeseen")
        return await original(*args, **kwargs)

    monkeypatch.setattr(runner._queue, "claim", claim)
    runner.start()
    runner.allow(True)
    await bench.put("one")
    assert (await bench.answer("one")).status == 200


async def test_one_that_is_closed_says_nothing_and_its_jobs_stay_claimed(bench: Bench) -> None:
    """As if it were killed."""
    runner, stub = await bench.worker()
    stub.answer = stub.hold
    await bench.put("one")
    await until(lambda: stub.open == 1)
    await runner.close()
    (job,) = await bench.queue.jobs(POOL)
    assert (job.claimant, job.attempt) == (f"{RECORD.id}@{RECORD.epoch}", 1)
    assert stub.given_up <= 1
    await runner.close()
