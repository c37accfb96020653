"""Which failures of a worker are met by asking another, how often, and what the client is told beyond that."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from tests.unit.router.conftest import PD, StartCluster, StartWorker, until
from tests.unit.router.fake_worker import Hook, Seen, cut, status
from tests.unit.router.test_failures import STREAM, WHOLE, two_decoders
from vllm_pd.router.breaker import FAILURES_TO_OPEN, Circuit
from vllm_pd.router.decode_leg import MAX_DECODE_ATTEMPTS
from vllm_pd.state import Role


async def test_many_workers_that_refuse_do_not_use_up_the_attempts(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(policy="least-loaded")
    workers = [await start_worker() for _ in range(MAX_DECODE_ATTEMPTS + 3)]
    for worker in workers:
        await cluster.join(worker, Role.DECODE)
    *dead, alive = workers
    await cluster.load(alive, running=9)
    for worker in dead:
        await worker.stop()
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert cluster.metric("decode_retry_total", reason="connect") == len(dead)


async def test_request_that_kills_its_workers_does_not_go_round_the_cluster(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster()
    workers = [await start_worker() for _ in range(MAX_DECODE_ATTEMPTS + 3)]
    for worker in workers:
        worker.hook = cut
        await cluster.join(worker, Role.DECODE)
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 502
    assert sum(len(worker.posts) for worker in workers) == MAX_DECODE_ATTEMPTS


@pytest.mark.parametrize("code", [429, 503])
async def test_busy_worker_is_spared_for_as_long_as_it_asks(
    start_cluster: StartCluster, start_worker: StartWorker, code: int
) -> None:
    cluster, (_, first, second) = await two_decoders(start_cluster, start_worker)
    first.hook = status(code, **{"Retry-After": "20"})
    for _ in range(10):
        assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert (len(first.posts), len(second.posts)) == (1, 10)
    page = json.loads((await cluster.get("/ready"))[1])
    assert [worker["trouble"] for worker in page["workers"]] == [None] * 3, "too busy is not broken"


async def test_errors_of_clients_never_cost_a_worker_its_place(pd: PD) -> None:
    pd.decode.hook = status(400)
    for _ in range(20):
        assert (await pd.cluster.post("/v1/completions", WHOLE))[0] == 400
    assert not any(worker.is_broken for worker in pd.cluster.service.directory.workers)
    assert len(pd.decode.posts) == 20


async def failed_inside(request: web.Request, _: Seen) -> web.StreamResponse:
    """As vLLM does when its engine dies before the first token of a stream."""
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    error = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}
    await reply.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
    await reply.write_eof()
    return reply


@pytest.mark.parametrize("hook", [status(500), failed_inside])
async def test_request_that_fails_inside_a_worker_is_tried_on_one_other(
    start_cluster: StartCluster, start_worker: StartWorker, hook: Hook
) -> None:
    cluster, (_, first, second) = await two_decoders(start_cluster, start_worker)
    first.hook = hook
    code, answer = await cluster.post("/v1/completions", STREAM)
    assert code == 200
    assert b"error" not in answer
    assert cluster.metric("decode_retry_total", reason="status_5xx") == 1
    # The blocks may have been read already.
    assert "kv_transfer_params" not in second.posts[0].json


async def test_request_that_fails_inside_two_workers_is_its_own_fault(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster()
    workers = [await start_worker() for _ in range(4)]
    for worker in workers:
        worker.hook = status(500)
        await cluster.join(worker, Role.DECODE)
    code, answer = await cluster.post("/v1/completions", WHOLE)
    assert code == 500
    assert json.loads(answer)["error"]["message"] == "status 500"
    assert sum(len(worker.posts) for worker in workers) == 2


async def test_worker_that_fails_again_and_again_is_left_out_and_tried_later(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, (_, first, _) = await two_decoders(start_cluster, start_worker)
    first.hook = status(500)
    for _ in range(FAILURES_TO_OPEN):
        assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    known = next(worker for worker in cluster.service.directory.workers if worker.id == first.host_port)
    assert known.breaker.circuit is Circuit.OPEN
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert len(first.posts) == FAILURES_TO_OPEN
    await until(lambda: known.breaker.circuit is Circuit.HALF_OPEN, "it answers /health")
    first.hook = None
    assert (await cluster.post("/v1/completions", WHOLE))[0] == 200
    assert not known.is_broken
    assert len(first.posts) == FAILURES_TO_OPEN + 1


async def test_beyond_the_retry_budget_the_client_gets_an_honest_error(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(policy="least-loaded", retry_ratio=0.0, retry_floor=0.0)
    workers = [await start_worker() for _ in range(2)]
    for worker in workers:
        await cluster.join(worker, Role.DECODE)
    await cluster.load(workers[1], running=9)
    workers[0].hook = cut
    code, answer = await cluster.post("/v1/completions", WHOLE)
    assert code == 502
    message = json.loads(answer)["error"]["message"]
    assert workers[0].host_port in message
    assert "--retry-ratio" in message
    assert (len(workers[0].posts), len(workers[1].posts)) == (1, 0)
    # A refusal reaches the client as it is.
    workers[0].hook = status(503, **{"Retry-After": "9"})
    async with cluster.client.post(cluster.url + "/v1/completions", data=WHOLE) as reply:
        assert reply.status == 503
        assert reply.headers["Retry-After"] == "9"
    assert len(workers[1].posts) == 0
    assert cluster.metric("decode_retry_total", reason="no_budget") == 2


async def test_retries_stop_when_the_whole_cluster_fails(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(retry_ratio=0.2, retry_floor=5.0)
    workers = [await start_worker() for _ in range(3)]
    for worker in workers:
        worker.hook = status(503)
        await cluster.join(worker, Role.DECODE)
    for _ in range(50):
        assert (await cluster.post("/v1/completions", WHOLE))[0] == 503
    assert sum(len(worker.posts) for worker in workers) <= 50 + 5 + 0.2 * 50
