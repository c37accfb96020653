"""What crosses the router untouched: bytes, headers, status, and each chunk at once."""

from __future__ import annotations

import asyncio
import gzip
import json

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from tests.unit.router.conftest import LONG, PD, StartCluster, StartWorker
from tests.unit.router.fake_worker import Seen, status
from vllm_pd.state import Role

WHOLE = b'{ "prompt" : "hi" ,\n "n":2, "temperature":0.10, "unknown\\u0041": [1,2] }'
SPLIT = json.dumps({"prompt": LONG, "max_tokens": 20, "stream": True}).encode()


async def test_bytes_of_a_whole_request_arrive_unchanged(pd: PD) -> None:
    await pd.cluster.post("/v1/completions", WHOLE)
    assert pd.decode.posts[0].raw == WHOLE


async def test_query_is_passed_on_as_it_was_written(pd: PD) -> None:
    url = URL(f"{pd.cluster.url}/v1/completions?a=%2F&b=1+2", encoded=True)
    async with pd.cluster.client.post(url, data=WHOLE) as reply:
        assert reply.status == 200
    assert pd.decode.posts[0].path == "/v1/completions?a=%2F&b=1+2"


async def test_unknown_headers_pass_both_ways_and_connection_headers_do_not(pd: PD) -> None:
    async def answer(_: web.Request, __: Seen) -> web.StreamResponse:
        reply = web.json_response({"ok": True})
        reply.headers.update({"X-Answer": "1", "Connection": "X-Secret-Hop", "X-Secret-Hop": "x"})
        reply.headers.add("Set-Cookie", "a=1")
        reply.headers.add("Set-Cookie", "b=2")
        return reply

    pd.decode.hook = answer
    headers = {
        "X-Tenant": "blue",
        "traceparent": "00-1-2-01",
        "Authorization": "Bearer client",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "gone",
        "Proxy-Authorization": "Basic x",
        "TE": "trailers",
    }
    async with pd.cluster.client.post(pd.cluster.url + "/v1/completions", data=WHOLE, headers=headers) as reply:
        assert reply.headers["X-Answer"] == "1"
        assert reply.headers.getall("Set-Cookie") == ["a=1", "b=2"]
        assert "X-Secret-Hop" not in reply.headers
    seen = pd.decode.posts[0]
    assert seen.header("X-Tenant") == "blue"
    assert seen.header("traceparent") == "00-1-2-01"
    assert seen.header("Authorization") == "Bearer client"
    assert seen.header("Host") == pd.decode.host_port
    assert not [name for name, _ in seen.headers if name.lower() in ("x-hop", "proxy-authorization", "te")]


@pytest.mark.parametrize("code", [400, 401, 404, 422, 429, 500])
async def test_status_and_body_of_the_worker_reach_the_client(pd: PD, code: int) -> None:
    pd.decode.hook = status(code, **{"Retry-After": "7"})
    async with pd.cluster.client.post(pd.cluster.url + "/v1/completions", data=WHOLE) as reply:
        assert reply.status == code
        assert reply.headers["Retry-After"] == "7"
        assert (await reply.json())["error"]["message"] == f"status {code}"
    assert len(pd.decode.posts) == 1


async def test_compressed_answer_passes_as_it_is(pd: PD) -> None:
    packed = gzip.compress(b'{"ok": true}' * 100)

    async def answer(_: web.Request, __: Seen) -> web.StreamResponse:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

    pd.decode.hook = answer
    async with pd.cluster.client.post(pd.cluster.url + "/v1/completions", data=WHOLE) as reply:
        assert reply.headers["Content-Encoding"] == "gzip"
        assert await reply.read() == packed


async def test_compressed_request_passes_whole_as_it_is(pd: PD) -> None:
    packed = gzip.compress(SPLIT)
    await pd.cluster.post("/v1/completions", packed, headers={"Content-Encoding": "gzip"})
    assert pd.prefill.posts == []
    # aiohttp's server, the fake worker, unpacks it.
    assert pd.decode.posts[0].raw == SPLIT
    assert pd.decode.posts[0].header("Content-Encoding") == "gzip"


@pytest.mark.parametrize("size", [0, 1, 65_535, 5_000_000])
async def test_answers_of_any_size_and_both_framings_arrive_whole(pd: PD, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)

    async def answer(request: web.Request, _: Seen) -> web.StreamResponse:
        if request.query.get("framing") == "length":
            return web.Response(body=content)
        reply = web.StreamResponse()
        await reply.prepare(request)
        for start in range(0, size, 100_000):
            await reply.write(content[start : start + 100_000])
        return reply

    pd.decode.hook = answer
    for framing in ("length", "chunked"):
        assert (await pd.cluster.post(f"/v1/completions?framing={framing}", WHOLE))[1] == content


async def test_large_request_body_arrives_whole(pd: PD) -> None:
    body = json.dumps({"prompt": "x" * 8_000_000, "n": 2}).encode()
    assert (await pd.cluster.post("/v1/completions", body))[0] == 200
    assert pd.decode.posts[0].raw == body


async def test_first_chunk_arrives_before_the_second_is_made(pd: PD) -> None:
    pd.decode.gate = asyncio.Event()
    async with pd.cluster.client.post(pd.cluster.url + "/v1/completions", data=SPLIT) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        assert await reply.content.readany() == b'data: {"n":1}\n\n'
        pd.decode.gate.set()
        assert await reply.read() == b'data: {"n":2}\n\ndata: [DONE]\n\n'


async def test_request_ids_tell_the_legs_apart(pd: PD) -> None:
    await pd.cluster.post("/v1/completions", SPLIT, headers={"X-Request-Id": "abc"})
    assert pd.prefill.posts[0].header("X-Request-Id") == "abc-prefill"
    assert pd.decode.posts[0].header("X-Request-Id") == "abc"


async def test_request_id_is_made_up_only_where_the_client_named_none(pd: PD) -> None:
    await pd.cluster.post("/v1/completions", SPLIT)
    made = pd.decode.posts[0].header("X-Request-Id")
    assert made
    assert pd.prefill.posts[0].header("X-Request-Id") == f"{made}-prefill"
    # A header would override what the client wrote into the body.
    await pd.cluster.post("/v1/completions", SPLIT[:-1] + b', "request_id": "mine"}')
    assert pd.decode.posts[1].header("X-Request-Id") is None
    assert pd.prefill.posts[1].header("X-Request-Id") == "mine-prefill"


@pytest.mark.parametrize("name", ["a\r\nX-Evil: 1", "a\0", "\u00e9", "x" * 300])
async def test_request_id_that_cannot_stand_in_a_header_stays_in_the_body(pd: PD, name: str) -> None:
    body = json.dumps({"prompt": LONG, "max_tokens": 20, "request_id": name}).encode()
    assert (await pd.cluster.post("/v1/completions", body))[0] == 200
    assert len(pd.prefill.posts) == 1
    assert pd.prefill.posts[0].header("X-Evil") is None
    assert pd.decode.posts[0].header("X-Request-Id") is None
    assert pd.decode.posts[0].json["request_id"] == name


async def test_request_that_names_its_whole_url_is_served(pd: PD) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", pd.cluster.service.port)
    head = b"POST http://elsewhere:81/v1/completions?a=%%2F HTTP/1.1\r\nHost: elsewhere\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(WHOLE) + WHOLE)
    assert b" 200 " in await reader.readline()
    writer.close()
    assert pd.decode.posts[0].path == "/v1/completions?a=%2F"


async def test_http_1_0_client_gets_a_streamed_answer(pd: PD) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", pd.cluster.service.port)
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(SPLIT) + SPLIT)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.0 200")
    assert answer.endswith(b"data: [DONE]\n\n")
    assert b"ransfer-Encoding" not in answer


async def test_client_that_waits_for_100_continue_is_told_to_go_on(pd: PD) -> None:
    async with pd.cluster.client.post(pd.cluster.url + "/v1/completions", data=WHOLE, expect100=True) as reply:
        assert reply.status == 200
    assert pd.decode.posts[0].raw == WHOLE
    assert pd.decode.posts[0].header("Expect") is None


async def test_one_connection_carries_many_requests(pd: PD) -> None:
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as client:
        for body in (WHOLE, SPLIT, WHOLE):
            async with client.post(pd.cluster.url + "/v1/completions", data=body) as reply:
                assert reply.status == 200
                await reply.read()
    assert len(pd.decode.posts) == 3


async def test_eight_streams_at_once_do_not_mix(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster = await start_cluster()
    worker = await start_worker()
    await cluster.join(worker, Role.BOTH)

    async def echo(request: web.Request, seen: Seen) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        for _ in range(20):
            await reply.write(seen.json["tag"].encode())
            await asyncio.sleep(0)
        return reply

    worker.hook = echo
    answers = await asyncio.gather(*(cluster.post("/v1/completions", {"tag": f"<{n}>"}) for n in range(8)))
    assert [answer for _, answer in answers] == [f"<{n}>".encode() * 20 for n in range(8)]
