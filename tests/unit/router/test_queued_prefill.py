"""Prefill work through the store's queue: real store, real HTTP, the agent's own runner; and every way around it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from tests.unit.router.conftest import BLOCK, LONG, until
from tests.unit.router.fake_worker import TRANSFER, Seen, hang, status
from tests.unit.router.queue_cluster import BODY, POOL, QueueCluster, queue_cluster
from tests.unit.router.test_kv_routing import PROMPT, announce, keys
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.router import queued_prefill
from vllm_pd.router.explanation import DECISION_HEADER, EXPLAIN_HEADER
from vllm_pd.state import Holder, Role
from vllm_pd.state.prefill_payload import PrefillAnswer, decode_request, encode_answer
from vllm_pd.state.prefill_queue import Claimant, JobId, JobResult, PrefillJob, QueueLimits

PUT_DEADLINE_S = queued_prefill.PUT_DEADLINE_S
Open = Callable[..., AbstractAsyncContextManager[QueueCluster]]


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine alone must not be the reason for another way."""
    monkeypatch.setattr(queued_prefill, "PUT_DEADLINE_S", 10.0)


@pytest.fixture
def opened(store: EmbeddedStore) -> Open:
    return partial(queue_cluster, store)


@pytest.fixture
async def cluster(opened: Open) -> AsyncIterator[QueueCluster]:
    async with opened() as cluster:
        yield cluster


async def test_prompt_is_claimed_from_the_queue_and_read_by_the_decode_worker(cluster: QueueCluster) -> None:
    prefill, decode = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
    code, _, headers = await cluster.post(headers={EXPLAIN_HEADER: "1", "X-Request-Id": "abc"})
    assert code == 200
    (leg,) = prefill.legs
    assert leg.header("X-Request-Id") == "abc-prefill"
    assert leg.json["max_tokens"] == 1
    assert decode.worker.posts[0].json["kv_transfer_params"] == TRANSFER
    told = json.loads(headers[DECISION_HEADER])
    assert (told["way"], told["stream"], told["prefilled_on"]) == ("queue", "shared", prefill.entry.id)
    assert told["prefill_failure"] is None
    assert cluster.metric("prefill_dispatch_total", way="queue", outcome="done") == 1
    assert await cluster.jobs() == []
    assert prefill.released == []


async def test_nothing_of_a_clients_credentials_is_in_the_store(cluster: QueueCluster) -> None:
    await cluster.join(Role.PREFILL, runs=False)
    await cluster.join(Role.DECODE)
    secret = {"Authorization": "Bearer sesame", "Cookie": "a=sesame", "X-Tenant-Key": "sesame"}
    request = asyncio.create_task(cluster.post(headers={**secret, "X-Session-Id": "s", "traceparent": "00-1-2-01"}))
    (job,) = await cluster.queued()
    found = await cluster.queue.peek(POOL, job.id)
    assert found is not None
    assert b"sesame" not in found[1]
    told = dict(decode_request(found[1]).headers)
    assert {name.lower() for name in told} == {"content-type", "x-request-id", "x-session-id", "traceparent"}
    request.cancel()


async def test_headers_that_cannot_be_packed_stay_behind(cluster: QueueCluster) -> None:
    prefill, _ = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
    body = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nConnection: close\r\nX-Request-Id: \xff\xfe\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.service.port)
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert prefill.legs[0].header("X-Request-Id") is None


@pytest.mark.parametrize(
    ("second", "reason", "times"),
    [
        ({"claims": False}, "worker_does_not_claim", 1),
        ({"asks_key": True}, "client_key", 2),
        ({"models": ("other",)}, "model_not_everywhere", 2),
    ],
)
async def test_what_the_queue_cannot_do_is_sent_directly(
    cluster: QueueCluster, second: dict[str, Any], reason: str, times: int
) -> None:
    """The first worker claims everything; what the second one is like decides."""
    await cluster.join(Role.PREFILL)
    await cluster.join(Role.PREFILL, **second)
    await cluster.join(Role.DECODE)
    for _ in range(2):
        assert (await cluster.post({"model": "m", **BODY}))[0] == 200
    assert cluster.metric("prefill_direct_total", reason=reason) == times
    assert cluster.metric("prefill_dispatch_total", way="direct", outcome="done") == times
    assert await cluster.jobs() == []


async def test_client_with_its_own_key_is_let_through_the_queue_by_a_router_that_checks_it(opened: Open) -> None:
    async with opened(worker_api_key="workers") as cluster:
        prefill = await cluster.join(Role.PREFILL, asks_key=True, api_key="workers")
        await cluster.join(Role.DECODE)
        assert (await cluster.post())[0] == 200
        assert prefill.legs[0].header("Authorization") == "Bearer workers"
        assert cluster.metric("prefill_dispatch_total", way="queue", outcome="done") == 1


async def test_direct_dispatch_can_be_asked_for(opened: Open) -> None:
    async with opened(prefill_dispatch="direct") as cluster:
        prefill = await cluster.join(Role.PREFILL, claims=False)
        await cluster.join(Role.DECODE)
        assert (await cluster.post())[0] == 200
        assert len(prefill.legs) == 1
        assert cluster.service.queues is None
        assert cluster.metric("prefill_dispatch_total", way="direct", outcome="done") == 1


async def test_client_that_names_an_engine_gets_that_one(cluster: QueueCluster) -> None:
    prefill, _ = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
    assert (await cluster.post(headers={"X-data-parallel-rank": "0"}))[0] == 200
    assert prefill.legs[0].header("X-data-parallel-rank") == "0"
    assert cluster.metric("prefill_direct_total", reason="names_rank") == 1


async def test_long_body_does_not_go_into_the_store(cluster: QueueCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued_prefill, "MAX_PAYLOAD", 100)
    await cluster.join(Role.PREFILL)
    await cluster.join(Role.DECODE)
    assert (await cluster.post())[0] == 200
    assert cluster.metric("prefill_direct_total", reason="large_body") == 1


async def test_priorities_of_clients_order_the_queue(cluster: QueueCluster) -> None:
    await cluster.join(Role.PREFILL, runs=False)
    await cluster.join(Role.DECODE)
    requests = []
    for count, priority in enumerate((0, 5, -5)):
        body = {"prompt": LONG + str(count), "max_tokens": 9, "priority": priority}
        requests.append(asyncio.create_task(cluster.post(body)))
        await cluster.queued(count + 1)
    order = sorted(await cluster.jobs(), key=lambda job: job.order)
    payloads = [await cluster.queue.peek(POOL, job.id) for job in order]
    bodies = [json.loads(decode_request(found[1]).body) for found in payloads if found is not None]
    assert [body["prompt"][-1] for body in bodies] == ["2", "0", "1"]
    for request in requests:
        request.cancel()


@pytest.mark.parametrize(("held", "own"), [((6, 5), True), ((5, 5), False), ((0, 0), False)])
async def test_job_waits_for_the_worker_that_has_more_of_its_prompt_than_any_other(
    cluster: QueueCluster, held: tuple[int, int], own: bool
) -> None:
    workers = [await cluster.join(Role.PREFILL, runs=False) for _ in held]
    await cluster.join(Role.DECODE)
    watch = cluster.service.watch
    assert watch is not None
    for member, blocks in zip(workers, held, strict=True):
        holder = Holder(member.entry.id, 0)
        await announce(cluster.index, member.worker, keys(PROMPT)[:blocks])
        await until(
            lambda holder=holder, blocks=blocks: (
                (mirror := watch.mirror(POOL)) is not None
                and holder in mirror.prefixes
                and mirror.prefixes.blocks(holder) == blocks
            ),
            "the router knows the blocks",
        )
    request = asyncio.create_task(cluster.post({"prompt": PROMPT, "max_tokens": 9}))
    (job,) = await cluster.queued()
    assert job.worker == (workers[0].entry.id if own else None)
    assert job.tokens == len(PROMPT) - held[0] * BLOCK
    request.cancel()


async def test_job_for_a_full_stream_of_its_worker_goes_to_all(opened: Open) -> None:
    async with opened(limits=QueueLimits(length=1)) as cluster:
        worker = await cluster.join(Role.PREFILL, runs=False)
        await cluster.join(Role.DECODE)
        await announce(cluster.index, worker.worker, keys(PROMPT))
        watch, holder = cluster.service.watch, Holder(worker.entry.id, 0)
        assert watch is not None
        await until(
            lambda: (mirror := watch.mirror(POOL)) is not None and holder in mirror.prefixes, "the blocks are known"
        )
        await cluster.queue.put(POOL, PrefillJob(JobId("first"), 1, b"", worker=worker.entry.id), 60_000)
        request = asyncio.create_task(cluster.post({"prompt": PROMPT, "max_tokens": 9}))
        jobs = await cluster.queued(2)
        assert {job.worker for job in jobs} == {None, worker.entry.id}
        request.cancel()


async def test_each_router_gets_the_results_of_its_own_jobs(opened: Open) -> None:
    async with opened() as cluster, opened() as second:
        prefill, decode = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
        await until(
            lambda: second.is_up and all(second.service.directory.get(m.entry.id) for m in (prefill, decode)),
            "the second router is ready",
        )
        answers = await asyncio.gather(*(each.post() for each in (cluster, second) for _ in range(5)))
        assert [code for code, _, _ in answers] == [200] * 10
        for each in (cluster, second):
            assert each.metric("prefill_dispatch_total", way="queue", outcome="done") == 5


async def test_one_slow_answer_of_the_store_does_not_keep_others_from_the_queue(
    cluster: QueueCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.join(Role.PREFILL)
    await cluster.join(Role.DECODE)
    assert cluster.service.queues is not None
    queue = cluster.service.queues.queue
    put, answered = queue.put, asyncio.Event()

    async def slow(*args: Any) -> bool:
        await answered.wait()
        return await put(*args)

    monkeypatch.setattr(queue, "put", slow)
    monkeypatch.setattr(queued_prefill, "PUT_DEADLINE_S", 0.01)
    assert (await cluster.post())[0] == 200
    assert cluster.metric("prefill_direct_total", reason="store_slow") == 1
    assert cluster.watched.problem == ""
    for _ in range(2):
        assert (await cluster.post())[0] == 200
    assert cluster.watched.problem == "the store took over 10 ms for each of several jobs"
    # What is put too late is cancelled.
    answered.set()
    await cluster.queued(0)
    monkeypatch.setattr(queued_prefill, "PUT_DEADLINE_S", 10.0)
    await until(lambda: cluster.is_up, "the queue is used again")
    assert (await cluster.post())[0] == 200
    assert cluster.metric("prefill_dispatch_total", way="queue", outcome="done") == 1


# The store is away.


async def test_store_that_stops_costs_no_request_its_answer(
    cluster: QueueCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued_prefill, "PUT_DEADLINE_S", PUT_DEADLINE_S)
    prefill, _ = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
    cluster.store.pause()
    for _ in range(3):
        assert (await cluster.post())[0] == 200
    assert len(prefill.legs) >= 3
    assert cluster.metric("prefill_dispatch_total", way="direct", outcome="done") == 3
    assert cluster.metric("prefill_direct_total", reason="store_slow") >= 1
    monkeypatch.setattr(queued_prefill, "PUT_DEADLINE_S", 10.0)
    cluster.store.resume()
    await until(lambda: cluster.is_up, "the queue is used again")
    assert (await cluster.post())[0] == 200
    assert cluster.metric("prefill_dispatch_total", way="queue", outcome="done") == 1


async def test_job_that_was_lost_with_the_store_is_sent_directly(cluster: QueueCluster) -> None:
    prefill, decode = await cluster.join(Role.PREFILL, runs=False), await cluster.join(Role.DECODE)
    request = asyncio.create_task(cluster.post())
    (job,) = await cluster.queued()
    hold = cluster.watched.jobs._waiting[job.id].hold
    cluster.store.kill()
    assert (await request)[0] == 200
    assert len(prefill.legs) == 1
    assert decode.worker.posts[0].json["kv_transfer_params"] == TRANSFER
    assert cluster.metric("prefill_direct_total", reason="job_lost") == 1
    # It may have been claimed, and only the store would have heard by whom.
    await until(lambda: prefill.released == [hold], "its blocks are let go")


async def test_store_that_restarts_empty_has_lost_the_job(cluster: QueueCluster) -> None:
    await cluster.join(Role.PREFILL, runs=False)
    await cluster.join(Role.DECODE)
    request = asyncio.create_task(cluster.post())
    await cluster.queued()
    cluster.store.kill()
    cluster.store.start()
    assert (await request)[0] == 200
    assert cluster.metric("prefill_direct_total", reason="job_lost") == 1
    await until(lambda: cluster.is_up, "the queue is used again")


# Nobody does it, or it fails.


async def test_job_that_nobody_claims_is_taken_back_in_time(opened: Open) -> None:
    async with opened(queue_timeout=0.3) as cluster:
        await cluster.join(Role.PREFILL, runs=False)
        decode = await cluster.join(Role.DECODE)
        code, _, headers = await cluster.post(headers={EXPLAIN_HEADER: "1"})
        assert code == 200
        assert "kv_transfer_params" not in decode.worker.posts[0].json
        assert json.loads(headers[DECISION_HEADER])["prefill_failure"] == "queue_timeout"
        assert cluster.metric("prefill_fallback_total", reason="queue_timeout") == 1
        await cluster.queued(0)


async def test_job_that_is_claimed_has_the_time_of_a_prefill(opened: Open) -> None:
    async with opened(queue_timeout=0.2, prefill_timeout=30.0) as cluster:
        prefill, decode = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
        may_end = asyncio.Event()

        async def slow(request: web.Request, seen: Seen) -> web.StreamResponse:
            await may_end.wait()
            return await prefill.worker.answer(request, seen)

        prefill.worker.hook = slow
        request = asyncio.create_task(cluster.post())
        await until(lambda: prefill.legs, "it is claimed")
        await asyncio.sleep(0.6)
        assert not request.done()
        may_end.set()
        assert (await request)[0] == 200
        assert decode.worker.posts[0].json["kv_transfer_params"] == TRANSFER


async def test_prefill_that_takes_too_long_is_given_up_and_its_worker_hears_so(opened: Open) -> None:
    async with opened(queue_timeout=0.2, prefill_timeout=0.6) as cluster:
        prefill, decode = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
        prefill.worker.hook = hang
        assert (await cluster.post())[0] == 200
        await until(prefill.legs[0].cancelled.is_set, "the worker gives it up")
        assert "kv_transfer_params" not in decode.worker.posts[0].json
        assert cluster.metric("prefill_fallback_total", reason="timeout") == 1
        await cluster.queued(0)


@pytest.mark.parametrize(
    ("code", "outcome", "tries"), [(400, "status_4xx", 1), (500, "dead_letter", 2), (200, "no_params", 1)]
)
async def test_failed_job_sends_the_request_whole(opened: Open, code: int, outcome: str, tries: int) -> None:
    limits = QueueLimits(attempts=2, patience_ms=0)
    async with opened(limits=limits) as cluster:
        prefill, decode = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
        prefill.worker.hook = status(code)
        assert (await cluster.post())[0] == 200
        assert len(prefill.legs) == tries
        assert "kv_transfer_params" not in decode.worker.posts[0].json
        assert cluster.metric("prefill_dispatch_total", way="queue", outcome=outcome) == 1
        if outcome == "no_params":
            hold = prefill.legs[0].json["kv_transfer_params"]["pd_hold"]
            await until(lambda: prefill.released == [hold], "what blocks it may keep are let go")


async def test_job_that_nobody_can_do_is_an_error_where_decode_workers_may_not_prefill(opened: Open) -> None:
    async with opened(limits=QueueLimits(attempts=1), require_prefill=True) as cluster:
        prefill, decode = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
        prefill.worker.hook = status(500)
        code, answer, _ = await cluster.post()
        message = json.loads(answer)["error"]["message"]
        assert code == 502
        assert message.startswith("The prompt could not be computed by a prefill worker (dead_letter: ")
        assert "500" in message
        assert decode.worker.posts == []


async def test_job_that_a_person_takes_out_of_the_queue_is_prefilled_by_the_decode_worker(
    cluster: QueueCluster,
) -> None:
    await cluster.join(Role.PREFILL, runs=False)
    decode = await cluster.join(Role.DECODE)
    request = asyncio.create_task(cluster.post())
    (job,) = await cluster.queued()
    assert await cluster.queue.cancel(POOL, job.id, "it was taken out by hand")
    assert (await request)[0] == 200
    assert "kv_transfer_params" not in decode.worker.posts[0].json


async def test_full_queue_has_the_decode_worker_prefill(opened: Open) -> None:
    async with opened(limits=QueueLimits(length=1)) as cluster:
        await fill(cluster)
        decode = await cluster.join(Role.DECODE)
        assert (await cluster.post())[0] == 200
        assert "kv_transfer_params" not in decode.worker.posts[0].json
        assert cluster.metric("prefill_fallback_total", reason="queue_full") == 1


async def test_full_queue_is_said_where_decode_workers_may_not_prefill(opened: Open) -> None:
    async with opened(limits=QueueLimits(length=1), require_prefill=True) as cluster:
        await fill(cluster, tokens=2_000_000)
        decode = await cluster.join(Role.DECODE)
        await until(lambda: cluster.watched.waiting_tokens == 2_000_000, "the router has seen the depth")
        code, answer, headers = await cluster.post()
        assert code == 503
        assert json.loads(answer)["error"]["message"] == (
            "The prefill queue is full; add prefill workers, or come again later. Decode workers do not stand in "
            "because of --require-prefill."
        )
        assert 10 < int(headers["Retry-After"]) <= 60
        assert decode.worker.posts == []


async def fill(cluster: QueueCluster, tokens: int = 1) -> None:
    """A worker that claims nothing, and one job in the shared stream."""
    await cluster.join(Role.PREFILL, runs=False)
    await cluster.queue.put(POOL, PrefillJob(JobId("first"), tokens, b""), 60_000)


async def test_unclaimed_job_is_an_error_where_decode_workers_may_not_prefill(opened: Open) -> None:
    async with opened(queue_timeout=0.2, require_prefill=True) as cluster:
        await cluster.join(Role.PREFILL, runs=False)
        await cluster.join(Role.DECODE)
        code, answer, headers = await cluster.post(headers={EXPLAIN_HEADER: "1"})
        assert (code, headers["Retry-After"]) == (503, "1")
        assert "No prefill worker took the prompt within 0.2 s" in json.loads(answer)["error"]["message"]
        assert json.loads(headers[DECISION_HEADER])["prefill_failure"] == "queue_timeout"


# Workers come and go.


async def test_worker_that_was_not_asked_for_may_do_the_job(cluster: QueueCluster) -> None:
    """Also one that joined after the request came."""
    first, decode = await cluster.join(Role.PREFILL, runs=False), await cluster.join(Role.DECODE)
    request = asyncio.create_task(cluster.post(headers={EXPLAIN_HEADER: "1"}))
    await cluster.queued()
    second = await cluster.join(Role.PREFILL)
    code, _, headers = await request
    assert code == 200
    assert (len(first.legs), len(second.legs)) == (0, 1)
    assert decode.worker.posts[0].json["kv_transfer_params"] == TRANSFER
    told = json.loads(headers[DECISION_HEADER])
    assert (told["prefill"]["worker"] if isinstance(told["prefill"], dict) else told["prefill"]) is not None
    assert told["prefilled_on"] == second.entry.id


async def test_job_of_a_worker_that_died_is_done_by_another(cluster: QueueCluster) -> None:
    first, decode = await cluster.join(Role.PREFILL, lease_ms=1000), await cluster.join(Role.DECODE)
    first.worker.hook = hang
    request = asyncio.create_task(cluster.post())
    await until(lambda: first.legs, "it is claimed")
    second = await cluster.join(Role.PREFILL)
    await first.die()
    assert (await request)[0] == 200
    assert len(second.legs) == 1
    assert decode.worker.posts[0].json["kv_transfer_params"] == TRANSFER
    assert cluster.metric("prefill_dispatch_total", way="queue", outcome="done") == 1


async def test_job_of_a_worker_that_gives_no_sign_of_life_is_done_by_another(opened: Open) -> None:
    """It stays registered: another of its processes may beat."""
    # Its own agent would claim the job again; others have a minute to be first.
    limits = QueueLimits(visibility_ms=60_000, patience_ms=60_000)
    async with opened(health_timeout=0.5, limits=limits) as cluster:
        first, decode = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
        first.worker.hook, first.worker.frozen = hang, True
        request = asyncio.create_task(cluster.post())
        await until(lambda: first.legs, "it is claimed")
        second = await cluster.join(Role.PREFILL)
        assert (await request)[0] == 200
        assert len(second.legs) == 1
        assert decode.worker.posts[0].json["kv_transfer_params"] == TRANSFER
        assert cluster.metric("prefill_dispatch_total", way="queue", outcome="done") == 1


async def test_job_of_a_worker_that_takes_no_connections_is_done_by_another(cluster: QueueCluster) -> None:
    """Long before its lease ends."""
    first, _ = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
    first.worker.hook = hang
    request = asyncio.create_task(cluster.post())
    await until(lambda: first.legs, "it is claimed")
    second = await cluster.join(Role.PREFILL)
    assert first.runner is not None
    await first.runner.close()
    await first.worker.stop()
    assert (await request)[0] == 200
    assert len(second.legs) == 1
    assert cluster.service.directory.get(first.entry.id) is not None
    assert cluster.watched.claimers == {second.entry.id}
    assert cluster.metric("prefill_dispatch_total", way="queue", outcome="done") == 1


async def test_job_that_waits_again_is_taken_back(opened: Open) -> None:
    async with opened(queue_timeout=0.3) as cluster:
        prefill, decode = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
        prefill.worker.hook = hang
        request = asyncio.create_task(cluster.post())
        await until(lambda: prefill.legs, "it is claimed")
        assert prefill.runner is not None
        prefill.runner.leave()
        await cluster.queue.rehome(POOL, prefill.entry.id)
        assert (await request)[0] == 200
        assert "kv_transfer_params" not in decode.worker.posts[0].json
        assert cluster.metric("prefill_fallback_total", reason="queue_timeout") == 1


async def test_only_worker_that_prefills_is_down(opened: Open) -> None:
    async with opened(health_timeout=0.5, require_prefill=True) as cluster:
        prefill, _ = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
        prefill.worker.hook, prefill.worker.frozen = hang, True
        request = asyncio.create_task(cluster.post())
        await until(lambda: prefill.legs, "it is claimed")
        assert prefill.runner is not None
        prefill.runner.leave()
        code, answer, _ = await request
        assert code == 503
        assert json.loads(answer)["error"]["message"].startswith("No worker that prefills for others is left; check")


async def test_worker_that_withdraws_finishes_what_it_has(cluster: QueueCluster) -> None:
    first, decode = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
    may_end = asyncio.Event()

    async def slow(request: web.Request, seen: Seen) -> web.StreamResponse:
        await may_end.wait()
        return await first.worker.answer(request, seen)

    first.worker.hook = slow
    request = asyncio.create_task(cluster.post())
    await until(lambda: first.legs, "it is claimed")
    second = await cluster.join(Role.PREFILL)
    await first.withdraw()
    await until(lambda: cluster.service.directory.get(first.entry.id) is None, "it has left")
    await until(lambda: first.entry.id in cluster.watched.missing, "its jobs were looked at")
    may_end.set()
    assert (await request)[0] == 200
    assert second.legs == []
    assert decode.worker.posts[0].json["kv_transfer_params"] == TRANSFER


async def test_last_worker_that_claims_leaves(cluster: QueueCluster) -> None:
    """What nobody has claimed is not waited for."""
    prefill, decode = await cluster.join(Role.PREFILL, runs=False), await cluster.join(Role.DECODE)
    request = asyncio.create_task(cluster.post())
    await cluster.queued()
    await prefill.withdraw()
    await prefill.worker.stop()
    assert (await request)[0] == 200
    assert "kv_transfer_params" not in decode.worker.posts[0].json


# Clients leave.


async def test_job_of_a_client_that_left_is_cancelled(cluster: QueueCluster) -> None:
    await cluster.join(Role.PREFILL, runs=False)
    await cluster.join(Role.DECODE)
    request = asyncio.create_task(cluster.post())
    await cluster.queued()
    request.cancel()
    await cluster.queued(0)
    assert sum(worker.inflight for worker in cluster.service.directory.workers) == 0


async def test_router_that_is_stopped_leaves_no_job_behind(cluster: QueueCluster) -> None:
    """The one request in the queue is cut after the grace time."""
    await cluster.join(Role.PREFILL, runs=False)
    await cluster.join(Role.DECODE)
    request = asyncio.create_task(cluster.post())
    await cluster.queued()
    await cluster.service.stop()
    assert await cluster.jobs() == []
    await asyncio.gather(request, return_exceptions=True)


async def test_worker_stops_computing_for_a_client_that_left(cluster: QueueCluster) -> None:
    prefill, _ = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
    prefill.worker.hook = hang
    request = asyncio.create_task(cluster.post())
    await until(lambda: prefill.legs, "it is claimed")
    request.cancel()
    await until(prefill.legs[0].cancelled.is_set, "the worker gives it up")
    await cluster.queued(0)


async def test_blocks_that_were_computed_for_nobody_are_let_go(cluster: QueueCluster) -> None:
    """The result overtakes the cancellation."""
    prefill, _ = await cluster.join(Role.PREFILL, runs=False), await cluster.join(Role.DECODE)
    request = asyncio.create_task(cluster.post())
    (job,) = await cluster.queued()
    claim = await cluster.queue.claim(POOL, Claimant(prefill.entry.id, prefill.entry.epoch), fits=-1)
    assert claim is not None
    hold = json.loads(decode_request(claim.job.payload).body)["kv_transfer_params"]["pd_hold"]
    assert cluster.service.queues is not None
    jobs = cluster.watched.jobs
    # As if its task had been cancelled and the store had not heard of it yet.
    jobs.done(jobs._waiting[job.id], abandoned=True)
    answer = PrefillAnswer(status=200, body=json.dumps({"kv_transfer_params": TRANSFER}).encode(), computed_ms=5)
    assert await cluster.queue.ack(POOL, claim, encode_answer(answer))
    await until(lambda: prefill.released == [hold], "the blocks are let go")
    request.cancel()


async def test_blocks_are_let_go_if_the_client_leaves_at_the_moment_of_the_result(cluster: QueueCluster) -> None:
    prefill = await cluster.join(Role.PREFILL)
    expected = cluster.watched.jobs.expect(JobId("job"), "hold")
    answer = PrefillAnswer(status=200, body=json.dumps({"kv_transfer_params": TRANSFER}).encode(), computed_ms=5)
    expected.result.set_result(JobResult(encode_answer(answer), worker=prefill.entry.id))

    async def put() -> str:
        return "shared"

    sent = asyncio.create_task(put())
    await sent
    assert cluster.service.queues is not None
    cluster.service.queues.leave(cluster.watched, expected, sent, read=False)
    await until(lambda: prefill.released == ["hold"], "the blocks are let go")


@pytest.mark.parametrize("dispatch", ["direct", "queue"])
async def test_blocks_of_a_client_that_left_are_let_go(opened: Open, dispatch: str) -> None:
    """Sent directly, the worker may have computed the prompt just then: it is told in any case."""
    async with opened(prefill_dispatch=dispatch) as cluster:
        prefill, _ = await cluster.join(Role.PREFILL, claims=dispatch == "queue"), await cluster.join(Role.DECODE)

        async def held(request: web.Request, seen: Seen) -> web.StreamResponse:
            if seen in prefill.legs:
                await asyncio.Event().wait()
            return await prefill.worker.answer(request, seen)

        prefill.worker.hook = held
        request = asyncio.create_task(cluster.post())
        await until(lambda: prefill.legs, "it is computed")
        request.cancel()
        await until(prefill.legs[0].cancelled.is_set, "the worker gives it up")
        if dispatch == "direct":
            hold = prefill.legs[0].json["kv_transfer_params"]["pd_hold"]
            await until(lambda: prefill.released == [hold], "the blocks are let go")


async def test_blocks_are_let_go_if_no_decode_worker_takes_the_request(cluster: QueueCluster) -> None:
    prefill, decode = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
    await decode.worker.stop()
    assert (await cluster.post())[0] in (502, 503)
    (leg,) = prefill.legs
    await until(lambda: prefill.released == [leg.json["kv_transfer_params"]["pd_hold"]], "the blocks are let go")


async def test_blocks_are_let_go_with_the_clients_key_where_workers_check_it(opened: Open) -> None:
    async with opened(api_key="everybodys") as cluster:
        prefill = await cluster.join(Role.PREFILL, asks_key=True, api_key="everybodys")
        decode = await cluster.join(Role.DECODE)
        await decode.worker.stop()
        assert (await cluster.post(headers={"Authorization": "Bearer everybodys"}))[0] in (502, 503)
        assert cluster.metric("prefill_dispatch_total", way="queue", outcome="done") == 1
        (leg,) = prefill.legs
        await until(lambda: prefill.released == [leg.json["kv_transfer_params"]["pd_hold"]], "the blocks are let go")


async def test_blocks_are_the_decode_workers_once_it_has_the_parameters(cluster: QueueCluster) -> None:
    """It may read them late: only their lease ends them."""
    prefill, decode = await cluster.join(Role.PREFILL), await cluster.join(Role.DECODE)
    decode.worker.hook = hang
    request = asyncio.create_task(cluster.post())
    await until(lambda: decode.worker.posts, "it has them")
    request.cancel()
    await until(decode.worker.posts[0].cancelled.is_set, "it gives the request up")
    assert cluster.metric("released_handoffs_total", outcome="released") == 0
    assert prefill.released == []


async def test_depth_is_exported_in_requests_and_tokens(cluster: QueueCluster) -> None:
    prefill = await cluster.join(Role.PREFILL, runs=False)
    for count in range(3):
        job = PrefillJob(JobId(str(count)), 100, b"", worker=prefill.entry.id if count else None)
        await cluster.queue.put(POOL, job, 60_000)
    await cluster.queue.claim(POOL, Claimant(prefill.entry.id, prefill.entry.epoch), fits=-1)

    def depth(name: str, stream: str, state: str) -> float:
        return cluster.metric(f"prefill_queue_{name}", pool=POOL, stream=stream, state=state)

    await until(lambda: depth("tokens", "own", "claimed") == 100, "the depth is known")
    assert depth("requests", "own", "waiting") == 1
    assert (depth("requests", "shared", "waiting"), depth("tokens", "shared", "waiting")) == (1, 100)
    assert cluster.metric("prefill_queue_up", pool=POOL) == 1
