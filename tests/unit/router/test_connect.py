"""Connections to workers: what a timeout says when it was this process that was late."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from vllm_pd.router import aiohttp_client
from vllm_pd.router.aiohttp_client import AiohttpUpstream
from vllm_pd.router.transport import ConnectTimeout

TIMEOUT_S = 0.2


@pytest.fixture
async def worker() -> AsyncIterator[str]:
    """URL of a server that takes every connection at once."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="fine")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def busy(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """Have the loop do something else for so long after each new socket; the number of sockets so far."""
    made, number = aiohttp_client._new_socket, [0]

    def with_work(address: aiohttp_client.aiohttp.AddrInfoType) -> socket.socket:
        number[0] += 1
        if number[0] == 1:
            asyncio.get_running_loop().call_soon(time.sleep, seconds)
        return made(address)

    monkeypatch.setattr(aiohttp_client, "_new_socket", with_work)
    return number


async def test_a_router_that_was_busy_itself_does_not_blame_the_worker(
    worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = busy(monkeypatch, 3 * TIMEOUT_S)
    upstream = AiohttpUpstream(connect_timeout=TIMEOUT_S)
    try:
        answer = await upstream.open("GET", worker, "/", [], None, 10.0)
        assert answer.status == 200
        answer.close()
    finally:
        await upstream.close()
    assert sockets == [2]


async def test_a_worker_that_takes_no_connection_is_given_up_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as full:
        listening = full.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listening.getsockname()
        for _ in range(4):
            # What the queue of connections has no room for is not answered.
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        sockets = busy(monkeypatch, 0.0)
        upstream = AiohttpUpstream(connect_timeout=TIMEOUT_S)
        try:
            with pytest.raises(ConnectTimeout, match=r"no connection within 0\.2 s"):
                await upstream.open("GET", f"http://127.0.0.1:{address[1]}", "/", [], None, 10.0)
        finally:
            await upstream.close()
        assert sockets == [1]
