"""The kernel is told to look after connections on which nobody says anything.

A host that vanishes cannot be shown without the right to drop packets; what is shown is that the kernel knows its task.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from vllm_pd.router.aiohttp_client import AiohttpUpstream
from vllm_pd.router.aiohttp_server import AiohttpServer
from vllm_pd.router.keepalive import IDLE_S, INTERVAL_S, QUESTIONS
from vllm_pd.router.transport import ClientReply, ClientRequest

OPTIONS = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): IDLE_S,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): INTERVAL_S,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): QUESTIONS,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 11_000,
}


def options_of(transport: Any) -> dict[tuple[int, int], int]:
    sock = transport.get_extra_info("socket")
    return {key: sock.getsockopt(*key) for key in OPTIONS}


async def answer(request: ClientRequest, reply: ClientReply) -> None:
    await reply.send(200, [], b"hi")


async def test_connections_of_clients_and_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original = web.Server.connection_made

    def noted(self: web.Server, handler: Any, transport: asyncio.Transport) -> None:
        made.append(transport)
        original(self, handler, transport)

    monkeypatch.setattr(web.Server, "connection_made", noted)
    connected = aiohttp.TCPConnector._wrap_create_connection

    async def noted_too(self: Any, *args: Any, **options: Any) -> Any:
        transport, protocol = await connected(self, *args, **options)
        made.append(transport)
        return transport, protocol

    monkeypatch.setattr(aiohttp.TCPConnector, "_wrap_create_connection", noted_too)
    server = AiohttpServer(answer, host="127.0.0.1", port=0, idle=5.0, grace=1.0)
    upstream = AiohttpUpstream(connect_timeout=5.0)
    try:
        port = await server.start()
        reply = await upstream.open("GET", f"http://127.0.0.1:{port}", "/", [], None, 5.0)
        assert await reply.read(100, 5.0) == b"hi"
        assert [options_of(transport) for transport in made] == [OPTIONS, OPTIONS]
        reply.close()
    finally:
        await upstream.close()
        await server.stop()
