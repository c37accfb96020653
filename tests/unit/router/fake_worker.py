"""A worker without a model: an OpenAI-shaped server on a real socket that records requests and fails on demand."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine-p",
    "remote_request_id": "cmpl-x",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}
ANSWER = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": "hi"}], "usage": {}}

Hook = Callable[[web.Request, "Seen"], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """One recorded request."""

    path: str
    raw: bytes
    headers: list[tuple[str, str]]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


class FakeWorker:
    """Set `hook` to answer in another way than the ordinary one, `models` to be somebody else.

    With `frozen` set it takes GET requests and answers none. With `gate` set, a streamed answer waits for it after its
    first chunk. `tokenize`, once set, answers its `/tokenize`, and those are not recorded.
    """

    def __init__(self, *, api_key: str = "", tls: ssl.SSLContext | None = None, models: tuple[str, ...] = ("m",)):
        self.seen: list[Seen] = []
        self.hook: Hook | None = None
        self.gate: asyncio.Event | None = None
        self.tokenize: Callable[[dict[str, Any]], list[int] | None] | None = None
        self.arrived = asyncio.Event()
        self.models = models
        self.metrics = 'vllm:cache_config_info{block_size="32",engine="0"} 1.0\n'
        self.healthy = True
        self.frozen = False
        self._api_key = api_key
        self._tls = tls
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def host_port(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.host_port}"

    @property
    def posts(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.raw]

    async def start(self) -> FakeWorker:
        app = web.Application(client_max_size=1 << 30)
        app[_WORKER] = self
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def refuse(self) -> None:
        """Take no connections any more, and keep those that are there."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self._api_key and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.method == "GET":
            if self.frozen:
                await asyncio.Event().wait()
            return self._get(request)
        raw = await request.read()
        if request.path == "/tokenize" and self.tokenize is not None:
            tokens = self.tokenize(json.loads(raw))
            if tokens is None:
                return web.json_response({"error": {"message": "no", "code": 404}}, status=404)
            return web.json_response({"count": len(tokens), "max_model_len": 2048, "tokens": tokens})
        seen = Seen(request.raw_path, raw, list(request.headers.items()))
        self.seen.append(seen)
        self.arrived.set()
        try:
            if self.hook is not None:
                return await self.hook(request, seen)
            return await self.answer(request, seen)
        except asyncio.CancelledError:
            seen.cancelled.set()
            raise

    def _get(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if request.path == "/version":
            return web.json_response({"version": "0.32.0"})
        if request.path == "/metrics":
            return web.Response(text=self.metrics)
        if request.path == "/v1/models":
            data = [{"id": name, "object": "model", "max_model_len": 2048} for name in self.models]
            return web.json_response({"object": "list", "data": data})
        return web.Response(status=404)

    async def answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        """The ordinary answer: transfer parameters to a prefill leg, SSE if asked for, else JSON."""
        try:
            body = seen.json
        except ValueError:
            return web.json_response({"error": {"message": "not JSON", "code": 400}}, status=400)
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return web.json_response({**ANSWER, "kv_transfer_params": TRANSFER})
        if body.get("stream"):
            return await self.stream(request)
        return web.json_response(ANSWER, headers={"X-Worker": self.host_port})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Worker": self.host_port})
        await response.prepare(request)
        await response.write(b'data: {"n":1}\n\n')
        if self.gate is not None:
            await self.gate.wait()
        await response.write(b'data: {"n":2}\n\n')
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


_WORKER = web.AppKey("worker", FakeWorker)


def status(code: int, **headers: str) -> Hook:
    """A hook that answers with this status."""

    async def hook(_: web.Request, __: Seen) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"status {code}", "code": code}}, status=code, headers=headers)

    return hook


def first_times(times: int, hook: Hook) -> Hook:
    """`hook` for the first `times` requests, the ordinary answer after."""
    left = [times]

    async def choose(request: web.Request, seen: Seen) -> web.StreamResponse:
        left[0] -= 1
        if left[0] >= 0:
            return await hook(request, seen)
        return await request.app[_WORKER].answer(request, seen)

    return choose


async def cut(request: web.Request, _: Seen) -> web.StreamResponse:
    """A hook that closes the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hang(_: web.Request, __: Seen) -> web.StreamResponse:
    """A hook that never answers."""
    await asyncio.Event().wait()
    raise AssertionError
