"""Requests of a process to its own HTTP server, over real sockets."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from aiohttp import web

from tests.certificates import Authority
from tests.unit.agent.own_server import OK, StubServer, answering, own_server, until
from vllm_pd.agent import prefill_own_server
from vllm_pd.agent.prefill_own_server import OwnApi, Posted, PostFailed
from vllm_pd.agent.readiness import OwnServer
from vllm_pd.background import end_tasks
from vllm_pd.graph.ports import free_port

DEADLINE_S = 30.0


async def post(stub: StubServer, **changes: object) -> Posted:
    api = OwnApi(stub.server)
    try:
        arguments = {"path": "/v1/x?y=%20z", "headers": [("X-A", "b")], "body": b"{}", "timeout_s": DEADLINE_S}
        return await api.post(**(arguments | changes))  # type: ignore[arg-type]
    finally:
        await api.close()


async def test_target_headers_and_body_arrive_as_they_are_and_the_answer_comes_back() -> None:
    async with own_server() as stub:
        stub.answer = answering(429, b"later", {"Retry-After": "3"})
        assert await post(stub) == Posted(429, b"later", "3")
        ((target, headers, body),) = stub.asked
    assert (target, body) == ("/v1/x?y=%20z", b"{}")
    assert headers.pop("host").startswith("127.0.0.1:")
    assert headers == {"x-a": "b", "content-length": "2"}


async def test_a_unix_socket(tmp_path: Path) -> None:
    async with own_server(uds=str(tmp_path / "s")) as stub:
        assert await post(stub) == Posted(200, OK)


async def test_tls_with_a_certificate_for_another_name(tmp_path: Path) -> None:
    made = Authority(tmp_path).issue("worker.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.pem, made.key)
    async with own_server(context=context) as stub:
        assert await post(stub) == Posted(200, OK)


async def test_an_idle_connection_that_the_server_closes_costs_nothing() -> None:
    async with own_server(keepalive_s=0.05) as stub:
        api = OwnApi(stub.server)
        for _ in range(5):
            assert (await api.post("/v1/x", [], b"{}", DEADLINE_S)).status == 200
            await asyncio.sleep(0.05)
        await api.close()
        await api.close()


async def test_cancelling_it_closes_the_connection() -> None:
    async with own_server() as stub:
        stub.answer = stub.hold
        task = asyncio.create_task(post(stub))
        await until(lambda: stub.open)
        await end_tasks((task,))
        await until(lambda: stub.given_up)


async def test_no_answer_in_time_is_said_with_the_time() -> None:
    async with own_server() as stub:
        stub.answer = stub.hold
        with pytest.raises(PostFailed, match=r"^the server of the worker did not answer within 0\.2 s$"):
            await post(stub, timeout_s=0.2)


async def test_a_server_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(PostFailed, match="gave no answer"):
        await post(StubServer(OwnServer(host="127.0.0.1", port=free_port())))


async def test_a_connection_that_breaks_off_is_said() -> None:
    async with own_server() as stub:

        async def break_off(request: web.Request) -> web.Response:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        stub.answer = break_off
        with pytest.raises(PostFailed, match="gave no answer"):
            await post(stub)
        # It may have been an idle connection's end: tried once more, and no further.
        assert len(stub.asked) == 2


async def test_a_header_that_would_begin_another_is_refused() -> None:
    async with own_server() as stub:
        with pytest.raises(PostFailed, match="gave no answer"):
            await post(stub, headers=[("X-A", "b\r\nX-C: d")])
        assert stub.asked == []


async def test_an_endless_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_own_server, "MAX_ANSWER", 10)
    async with own_server() as stub:
        with pytest.raises(PostFailed, match="longer than 10 bytes"):
            await post(stub)
