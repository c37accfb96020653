"""A worker's own HTTP server for tests of the prefill runner: it answers as it is told, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from vllm_pd.agent.readiness import OwnServer

OK = b'{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_request_id":"r"}}'

Answer = Callable[[web.Request], Awaitable[web.Response]]


def answering(status: int = 200, body: bytes = OK, headers: dict[str, str] | None = None) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers=headers)

    return answer


@dataclass
class StubServer:
    """`answer` may be changed at any time; the default hand-off parameters otherwise."""

    server: OwnServer
    answer: Answer = field(default_factory=answering)
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    """Target, headers in lower case, and body of each request, in order of arrival."""
    open: int = 0
    """Requests that are being answered."""
    given_up: int = 0
    """Requests whose client hung up."""
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    """What `hold` waits for."""

    async def hold(self, _: web.Request) -> web.Response:
        """An answer that takes until `may_end` is set."""
        await self.may_end.wait()
        return web.Response(body=OK)

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.asked.append((request.path_qs, {name.lower(): value for name, value in request.headers.items()}, body))
        self.open += 1
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.open -= 1


@asynccontextmanager
async def own_server(
    *, uds: str | None = None, context: ssl.SSLContext | None = None, keepalive_s: float = 60.0
) -> AsyncIterator[StubServer]:
    """One that listens on loopback, or on a Unix socket."""
    app = web.Application()
    stub = StubServer(OwnServer())
    app.router.add_post("/{path:.*}", stub.handle)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1, keepalive_timeout=keepalive_s
    )
    await runner.setup()
    site: web.BaseSite = web.UnixSite(runner, uds) if uds else web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = 0 if uds else runner.addresses[0][1]
    stub.server = OwnServer(uds=uds) if uds else OwnServer(host="0.0.0.0", port=port, tls=context is not None)
    try:
        yield stub
    finally:
        await runner.cleanup()


async def until(condition: Callable[[], object], deadline_s: float = 60.0) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(deadline_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
