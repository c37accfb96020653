"""A worker that refuses, hangs, breaks off or answers nonsense, and a client that leaves."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from tests.unit.router.conftest import LONG, PD, Cluster, StartCluster, StartWorker, record, until
from tests.unit.router.fake_worker import FakeWorker, Hook, Seen, cut, first_times, hang, status
from vllm_pd.holds import HOLD_FIELD, RELEASE_FIELD
from vllm_pd.router.aiohttp_server import UNHURRIED_BYTES
from vllm_pd.router.decode_leg import MAX_DECODE_ATTEMPTS
from vllm_pd.state import RegistrySnapshot, Role, WorkerId

BODY = json.dumps({"prompt": LONG, "max_tokens": 20}).encode()
STREAM = json.dumps({"prompt": LONG, "max_tokens": 20, "stream": True}).encode()
WHOLE = json.dumps({"prompt": LONG, "n": 2}).encode()


async def nonsense(_: web.Request, __: Seen) -> web.StreamResponse:
    return web.Response(text="<html>hello</html>")


async def no_params(_: web.Request, __: Seen) -> web.StreamResponse:
    return web.json_response({"choices": [], "kv_transfer_params": None})


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (status(400), "status_4xx"),
        (status(429), "status_429"),
        (status(503), "status_503"),
        (status(500), "status_5xx"),
        (nonsense, "no_params"),
        (no_params, "no_params"),
        (cut, "disconnect"),
    ],
)
async def test_failed_prefill_leg_sends_the_request_whole(pd: PD, hook: Hook, reason: str) -> None:
    pd.prefill.hook = hook
    assert (await pd.cluster.post("/v1/completions", BODY))[0] == 200
    assert pd.decode.posts[0].raw == BODY
    assert pd.cluster.metric("prefill_fallback_total", reason=reason) == 1
    assert pd.cluster.metric("split_total") == 0
    assert pd.cluster.inflight() == 0


@pytest.mark.parametrize("answers", ["nonsense", "no params"])
async def test_blocks_of_a_prefill_leg_without_transfer_parameters_are_let_go(pd: PD, answers: str) -> None:
    """They may have been lost on the way; the worker keeps the blocks until somebody reads them."""
    pd.prefill.hook = first_times(1, nonsense if answers == "nonsense" else no_params)
    await pd.cluster.post("/v1/completions", BODY)
    await until(lambda: len(pd.prefill.posts) == 2, "the worker was told")
    leg, told = pd.prefill.posts
    assert told.json["kv_transfer_params"] == {RELEASE_FIELD: [leg.json["kv_transfer_params"][HOLD_FIELD]]}


async def test_prefill_leg_that_hangs_is_cancelled_and_the_request_goes_whole(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(prefill_timeout=1.0)
    prefill, decode = await start_worker(), await start_worker()
    await cluster.join(prefill, Role.PREFILL)
    await cluster.join(decode, Role.DECODE)
    prefill.hook = hang
    assert (await cluster.post("/v1/completions", BODY))[0] == 200
    await until(prefill.posts[0].cancelled.is_set, "the prefill worker saw the end of the request")
    assert decode.posts[0].raw == BODY
    assert cluster.metric("prefill_fallback_total", reason="timeout") == 1


async def test_error_that_is_the_clients_own_comes_from_the_decode_worker(pd: PD) -> None:
    pd.prefill.hook = pd.decode.hook = status(400)
    code, answer = await pd.cluster.post("/v1/completions", BODY)
    assert code == 400
    assert json.loads(answer)["error"]["message"] == "status 400"


async def test_prefill_worker_that_refuses_is_replaced_by_another(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster()
    dead, alive, decode = await start_worker(), await start_worker(), await start_worker()
    for worker, role in ((dead, Role.PREFILL), (alive, Role.PREFILL), (decode, Role.DECODE)):
        await cluster.join(worker, role)
    await dead.stop()
    for _ in range(4):
        assert (await cluster.post("/v1/completions", BODY))[0] == 200
    assert len(alive.posts) == 4
    assert all("kv_transfer_params" in seen.json for seen in decode.posts)


@pytest.mark.parametrize("code", [429, 503])
async def test_prefill_worker_that_is_too_busy_has_its_prompt_done_by_another(
    start_cluster: StartCluster, start_worker: StartWorker, code: int
) -> None:
    cluster = await start_cluster()
    prefills, decode = [await start_worker(), await start_worker()], await start_worker()
    for prefill in prefills:
        await cluster.join(prefill, Role.PREFILL)
        prefill.hook = status(code)
    await cluster.join(decode, Role.DECODE)
    assert (await cluster.post("/v1/completions", BODY))[0] == 200
    assert [len(prefill.posts) for prefill in prefills] == [1, 1]
    assert decode.posts[0].raw == BODY
    assert cluster.metric("prefill_fallback_total", reason=f"status_{code}") == 1
    assert cluster.inflight() == 0


async def test_only_prefill_worker_refusing_sends_requests_whole(pd: PD) -> None:
    await pd.prefill.stop()
    for _ in range(3):
        assert (await pd.cluster.post("/v1/completions", BODY))[0] == 200
    assert [seen.raw for seen in pd.decode.posts] == [BODY] * 3
    assert pd.cluster.metric("prefill_fallback_total", reason="connect") == 1
    # After the first refusal it is left out without being asked.
    assert pd.cluster.metric("bypass_total", reason="no_prefill_worker") == 2


async def two_decoders(start_cluster: StartCluster, start_worker: StartWorker) -> tuple[Cluster, list[FakeWorker]]:
    """A prefill worker, a decode worker, and a second decode worker that is loaded, so that it comes second."""
    cluster = await start_cluster(policy="least-loaded")
    workers = [await start_worker() for _ in range(3)]
    for worker, role in zip(workers, (Role.PREFILL, Role.DECODE, Role.DECODE), strict=True):
        await cluster.join(worker, role)
    await cluster.load(workers[2], running=9)
    return cluster, workers


async def test_busy_decode_worker_is_replaced(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster, (prefill, first, second) = await two_decoders(start_cluster, start_worker)
    first.hook = status(503)
    assert (await cluster.post("/v1/completions", BODY))[0] == 200
    assert len(prefill.posts) == len(first.posts) == len(second.posts) == 1
    assert cluster.metric("decode_retry_total", reason="status_503") == 1


@pytest.mark.parametrize("hook", [cut, status(502), status(503), status(429)])
async def test_blocks_that_another_decode_worker_may_have_read_or_given_up_are_not_read_again(
    start_cluster: StartCluster, start_worker: StartWorker, hook: Hook
) -> None:
    """vLLM has the prefill worker let go of the blocks of a hand-off that it refuses."""
    cluster, (prefill, first, second) = await two_decoders(start_cluster, start_worker)
    first.hook = hook
    assert (await cluster.post("/v1/completions", BODY))[0] == 200
    assert len(prefill.posts) == 1
    assert "kv_transfer_params" in first.posts[0].json
    assert second.posts[0].raw == BODY
    assert cluster.metric("unread_handoffs_total", reason="perhaps_read") == 1


async def test_decode_worker_that_refuses_is_replaced(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster, (prefill, first, second) = await two_decoders(start_cluster, start_worker)
    await first.stop()
    assert (await cluster.post("/v1/completions", STREAM))[0] == 200
    assert len(prefill.posts) == len(second.posts) == 1
    assert json.loads((await cluster.get("/ready"))[1])["workers"]
    assert [w.id for w in cluster.service.directory.workers if w.is_broken] == [first.host_port]


async def test_stream_that_breaks_before_its_first_byte_moves_to_another_worker(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, (_, first, second) = await two_decoders(start_cluster, start_worker)

    async def head_only(request: web.Request, _: Seen) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        assert request.transport is not None
        request.transport.abort()
        return reply

    first.hook = head_only
    code, answer = await cluster.post("/v1/completions", STREAM)
    assert code == 200
    assert answer.endswith(b"data: [DONE]\n\n")
    assert len(second.posts) == 1


async def test_last_answer_of_a_busy_cluster_reaches_the_client(pd: PD) -> None:
    pd.decode.hook = status(503, **{"Retry-After": "9"})
    async with pd.cluster.client.post(pd.cluster.url + "/v1/completions", data=WHOLE) as reply:
        assert reply.status == 503
        assert reply.headers["Retry-After"] == "9"
        assert (await reply.json())["error"]["message"] == "status 503"


async def test_last_answer_reaches_the_client_also_when_more_workers_are_left_than_attempts(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster()
    workers = [await start_worker() for _ in range(MAX_DECODE_ATTEMPTS + 1)]
    for worker in workers:
        worker.hook = status(503, **{"Retry-After": "9"})
        await cluster.join(worker, Role.DECODE)
    async with cluster.client.post(cluster.url + "/v1/completions", data=WHOLE) as reply:
        assert reply.status == 503
        assert reply.headers["Retry-After"] == "9"
    assert sum(len(worker.posts) for worker in workers) == MAX_DECODE_ATTEMPTS


async def test_idle_connection_closed_by_the_worker_costs_no_request(pd: PD) -> None:
    pd.decode.hook = first_times(1, cut)
    assert (await pd.cluster.post("/v1/completions", WHOLE))[0] == 200
    assert len(pd.decode.posts) == 2


async def test_worker_that_always_cuts_is_named_in_an_honest_502(pd: PD) -> None:
    pd.decode.hook = cut
    code, answer = await pd.cluster.post("/v1/completions", WHOLE)
    assert code == 502
    error = json.loads(answer)["error"]
    assert error["code"] == 502
    assert pd.decode.host_port in error["message"]
    assert len(pd.decode.posts) == 2


async def test_dead_decode_worker_is_named_in_an_honest_502(pd: PD) -> None:
    await pd.decode.stop()
    code, answer = await pd.cluster.post("/v1/completions", WHOLE)
    assert code == 502
    assert f"Worker {pd.decode.host_port} takes no connections" in json.loads(answer)["error"]["message"]
    assert (await pd.cluster.get("/ready"))[0] == 503


async def test_worker_that_comes_back_is_used_again(pd: PD) -> None:
    await pd.decode.stop()
    assert (await pd.cluster.post("/v1/completions", WHOLE))[0] == 502
    await pd.decode.start()
    assert (await pd.cluster.post("/v1/completions", WHOLE))[0] == 200
    assert (await pd.cluster.get("/ready"))[0] == 200


async def test_prefiller_that_can_decode_finishes_alone_when_the_decode_worker_dies(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(policy="least-loaded")
    both, decode = await start_worker(), await start_worker()
    await cluster.join(both, Role.BOTH)
    await cluster.join(decode, Role.DECODE)
    await cluster.load(both, running=5)
    decode.hook = cut
    assert (await cluster.post("/v1/completions", BODY))[0] == 200
    assert [seen.json.get("max_tokens") for seen in both.posts] == [1, 20]
    # It has the blocks itself and must not be told to read them from itself.
    assert both.posts[1].raw == BODY
    assert cluster.metric("unread_handoffs_total", reason="own_blocks") == 1
    assert cluster.metric("split_total") == 0


async def test_silent_decode_worker_ends_in_504_naming_it(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(first_byte_timeout=1.0)
    worker = await start_worker()
    await cluster.join(worker, Role.BOTH)
    worker.hook = hang
    code, answer = await cluster.post("/v1/completions", WHOLE)
    assert code == 504
    assert worker.host_port in json.loads(answer)["error"]["message"]
    await until(worker.posts[0].cancelled.is_set, "the worker saw the end of the request")


async def test_stream_that_stalls_after_its_head_ends_in_504_and_is_not_sent_again(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(first_byte_timeout=1.0, policy="least-loaded")
    worker, other = await start_worker(), await start_worker()
    await cluster.join(worker, Role.BOTH)
    await cluster.join(other, Role.BOTH)
    await cluster.load(other, running=9)

    async def head_only(request: web.Request, seen: Seen) -> web.StreamResponse:
        await web.StreamResponse(headers={"Content-Type": "text/event-stream"}).prepare(request)
        return await hang(request, seen)

    worker.hook = head_only
    code, answer = await cluster.post("/v1/completions", WHOLE)
    assert code == 504
    assert worker.host_port in json.loads(answer)["error"]["message"]
    assert (len(worker.posts), len(other.posts)) == (1, 0)
    await until(worker.posts[0].cancelled.is_set, "the worker saw the end of the request")


async def test_cluster_without_decode_worker_says_what_is_missing(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster()
    code, answer = await cluster.post("/v1/completions", BODY)
    assert code == 503
    assert json.loads(answer)["error"]["type"] == "ServiceUnavailableError"
    worker = await start_worker()
    await cluster.join(worker, Role.PREFILL)
    code, answer = await cluster.post("/v1/completions", BODY)
    assert code == 503
    assert "No worker that decodes is alive" in json.loads(answer)["error"]["message"]
    assert worker.posts == []


def breaks_after(chunk: bytes, content_type: str) -> Hook:
    async def hook(request: web.Request, _: Seen) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": content_type})
        await reply.prepare(request)
        await reply.write(chunk)
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return reply

    return hook


async def test_stream_that_breaks_off_ends_with_an_error_event(pd: PD) -> None:
    pd.decode.hook = breaks_after(b'data: {"n":1}\n\n', "text/event-stream; charset=utf-8")
    code, answer = await pd.cluster.post("/v1/completions", STREAM)
    assert code == 200
    events = [event for event in answer.split(b"\n\n") if event]
    assert events[0] == b'data: {"n":1}'
    error = json.loads(events[1].removeprefix(b"data: "))["error"]
    assert pd.decode.host_port in error["message"]
    assert len(events) == 2


async def test_plain_answer_that_breaks_off_is_cut_for_the_client_too(pd: PD) -> None:
    pd.decode.hook = breaks_after(b'{"half', "application/json")
    with pytest.raises(aiohttp.ClientError):
        await pd.cluster.post("/v1/completions", WHOLE)


def json_answer(finish: str, *, sent: float = 1.0) -> Hook:
    """A hook that gives an answer with this finish reason, or breaks off after a part of it."""

    async def hook(request: web.Request, _: Seen) -> web.StreamResponse:
        choice = {"index": 0, "text": "word " * 200_000, "finish_reason": finish}
        body = json.dumps({"choices": [choice]}, separators=(",", ":")).encode()
        reply = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
        await reply.prepare(request)
        await reply.write(body[: int(len(body) * sent)])
        if sent < 1:
            assert request.transport is not None
            request.transport.abort()
        return reply

    return hook


@pytest.mark.parametrize("hook", [json_answer("abort"), json_answer("length", sent=0.9)])
async def test_an_answer_that_is_not_complete_is_asked_of_another_worker(
    start_cluster: StartCluster, start_worker: StartWorker, hook: Hook
) -> None:
    """vLLM answers with 200 and `abort` what it is told to stop before it is finished."""
    cluster, (_, first, second) = await two_decoders(start_cluster, start_worker)
    first.hook, second.hook = hook, json_answer("length")
    code, answer = await cluster.post("/v1/completions", BODY)
    assert code == 200
    assert json.loads(answer)["choices"][0]["finish_reason"] == "length"
    assert len(second.posts) == 1


async def test_an_answer_that_nobody_completes_ends_with_an_error(pd: PD) -> None:
    pd.decode.hook = json_answer("abort")
    code, answer = await pd.cluster.post("/v1/completions", BODY)
    assert code == 502
    assert pd.decode.host_port in json.loads(answer)["error"]["message"]


async def test_event_stream_of_declared_length_that_breaks_off_is_cut(pd: PD) -> None:
    async def short(request: web.Request, _: Seen) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Content-Length": "500"})
        await reply.prepare(request)
        await reply.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.close()
        return reply

    pd.decode.hook = short
    with pytest.raises(aiohttp.ClientError):
        await pd.cluster.post("/v1/completions", STREAM)


async def test_stream_that_stalls_is_ended(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster = await start_cluster(idle_timeout=1.0)
    worker = await start_worker()
    await cluster.join(worker, Role.BOTH)
    worker.gate = asyncio.Event()
    _, answer = await cluster.post("/v1/completions", STREAM)
    assert b"nothing came for 1 s" in answer
    await until(worker.posts[0].cancelled.is_set, "the worker saw the end of the request")


async def test_answer_in_one_piece_that_stalls_says_which_time_was_over(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    async def stalls(request: web.Request, seen: Seen) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
        await reply.prepare(request)
        await reply.write(b'{"half')
        return await hang(request, seen)

    cluster = await start_cluster(idle_timeout=1.0)
    worker = await start_worker()
    await cluster.join(worker, Role.BOTH)
    worker.hook = stalls
    code, answer = await cluster.post("/v1/completions", WHOLE)
    assert code == 504
    assert worker.host_port.encode() in answer
    assert b"nothing more within 1 s" in answer
    assert b"--idle-timeout" in answer


async def leave(cluster: Cluster, body: bytes, when: asyncio.Event) -> None:
    """Send a request and drop the connection once `when` is set."""
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.service.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    await asyncio.wait_for(when.wait(), 10)
    writer.transport.abort()


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_client_that_leaves_cancels_the_worker_at_once(pd: PD, phase: str, body: bytes) -> None:
    worker = pd.prefill if phase == "prefill" else pd.decode
    worker.hook = hang
    await leave(pd.cluster, body, worker.arrived)
    await until(worker.posts[0].cancelled.is_set, "the worker saw the client leave")
    await until(lambda: pd.cluster.inflight() == 0, "nothing is in flight")
    assert len(pd.decode.posts) == int(phase == "decode")
    await until(
        lambda: pd.cluster.metric("requests_total", endpoint="/v1/completions", status="499") == 1, "it was counted"
    )


async def test_client_that_leaves_in_mid_stream_cancels_the_worker_at_once(pd: PD) -> None:
    pd.decode.gate = asyncio.Event()
    reply = await pd.cluster.client.post(pd.cluster.url + "/v1/completions", data=STREAM)
    await reply.content.readany()
    reply.close()
    await until(pd.decode.posts[0].cancelled.is_set, "the worker saw the client leave")
    await until(lambda: pd.cluster.inflight() == 0, "nothing is in flight")


async def test_client_that_sends_half_a_body_reaches_no_worker(pd: PD) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", pd.cluster.service.port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"')
    await writer.drain()
    writer.transport.abort()
    await until(
        lambda: pd.cluster.metric("requests_total", endpoint="/v1/completions", status="499") == 1, "it was counted"
    )
    assert pd.decode.posts == pd.prefill.posts == []


@pytest.mark.parametrize("endless", [True, False])
async def test_client_that_reads_nothing_is_given_up(
    start_cluster: StartCluster, start_worker: StartWorker, endless: bool
) -> None:
    cluster = await start_cluster(idle_timeout=1.0)
    worker = await start_worker()
    await cluster.join(worker, Role.BOTH)

    async def flood(request: web.Request, _: Seen) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        while True:
            await reply.write(b"x" * 65_536)

    async def long_answer(_: web.Request, __: Seen) -> web.StreamResponse:
        return web.Response(body=b"x" * 20_000_000)

    worker.hook = flood if endless else long_answer
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.service.port, limit=1)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE)
    await asyncio.wait_for(worker.arrived.wait(), 10)
    if endless:
        await until(worker.posts[0].cancelled.is_set, "the worker saw the end of the request")
    await until(
        lambda: cluster.metric("requests_total", endpoint="/v1/completions", status="499") == 1, "it was counted"
    )
    assert cluster.inflight() == 0
    writer.transport.abort()


async def test_write_without_a_timer_never_waits(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.service.port)
    low, _ = writer.transport.get_write_buffer_limits()
    assert low >= UNHURRIED_BYTES
    writer.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "ftp://x", "nonsense"])
async def test_worker_with_an_unusable_url_counts_as_one_that_refuses(pd: PD, url: str) -> None:
    bad = record(pd.decode, Role.DECODE, id=WorkerId("a-bad-one"), url=url)
    await pd.cluster.registry.heartbeat(bad, 60_000)
    await until(lambda: len(pd.cluster.service.directory.workers) == 3, "it joined")
    for _ in range(3):
        assert (await pd.cluster.post("/v1/completions", BODY))[0] == 200
    assert (await pd.cluster.get("/v1/models"))[0] == 200
    assert pd.cluster.metric("decode_retry_total", reason="connect") >= 1


async def test_list_of_workers_survives_an_unforeseen_error(
    pd: PD, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> RegistrySnapshot:
        raise ValueError("nobody foresaw this")

    with monkeypatch.context() as patch:
        patch.setattr(pd.cluster.registry, "snapshot", broken)
        await until(lambda: "nobody foresaw this" in caplog.text, "it was logged")
    await pd.cluster.join(await start_worker(), Role.DECODE)


@pytest.mark.parametrize(
    "garbage",
    [b"GARBAGE\r\n\r\n", b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", b"\x16\x03\x01\x02\r\n\r\n"],
)
async def test_what_is_no_http_is_answered_with_400_and_not_logged(
    start_cluster: StartCluster, caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    cluster = await start_cluster()
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.service.port)
    writer.write(garbage)
    assert b" 400 " in await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    assert not [entry for entry in caplog.records if entry.levelname == "ERROR"]


async def test_body_that_stops_coming_is_given_up(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(idle_timeout=1.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.service.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()


async def test_body_over_the_limit_is_refused(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster = await start_cluster(max_body_mib=0.001)
    worker = await start_worker()
    await cluster.join(worker, Role.BOTH)
    code, answer = await cluster.post("/v1/completions", b"x" * 1049)
    assert code == 413
    assert "--max-body-mib" in json.loads(answer)["error"]["message"]
    assert (await cluster.post("/v1/completions", b"x" * 1048))[0] != 413


async def test_worker_whose_lease_ends_is_gone_and_serves_as_the_last_resort_while_it_takes_connections(pd: PD) -> None:
    await pd.cluster.registry.heartbeat(record(pd.decode, Role.DECODE), 300)
    await until(lambda: len(pd.cluster.service.directory.workers) == 1, "the lease ran out")
    assert (await pd.cluster.post("/v1/completions", BODY))[0] == 200
    assert (await pd.cluster.get("/ready"))[0] == 503
    await pd.decode.stop()
    assert (await pd.cluster.post("/v1/completions", BODY))[0] == 503
