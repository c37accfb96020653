"""`HttpServer` over aiohttp's low-level server: no application, no access log, a client that leaves cancels."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict

from vllm_pd.router.keepalive import keep_alive
from vllm_pd.router.transport import BodyError, ClientGone, Handler, Headers

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 512
READ_BUFFER_BYTES = 256 * 1024
BACKLOG = 2048
UNHURRIED_BYTES = 16 * 1024
"""asyncio's low-water mark: with less in the buffer, writing never waits. Above it, it may, until the client reads."""

_log = logging.getLogger(__name__)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """What a client sends wrongly is answered with 400; a traceback for each would let anybody fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError) or _log.isEnabledFor(logging.DEBUG)


_log.addFilter(_is_worth_logging)


class AiohttpRequest:
    """`ClientRequest` of one aiohttp request."""

    __slots__ = ("_headers", "_raw", "method", "path")

    def __init__(self, raw: web.BaseRequest) -> None:
        self._raw = raw
        self._headers: Headers | None = None
        self.method = raw.method
        self.path = raw.path

    @property
    def target(self) -> str:
        target = self._raw.raw_path
        # Clients of a forward proxy name the whole URL (RFC 9112, 3.2.2).
        return target if target.startswith("/") else self._raw.rel_url.raw_path_qs

    @property
    def headers(self) -> Headers:
        if self._headers is None:
            self._headers = list(self._raw.headers.items())
        return self._headers

    async def body(self, limit: int, idle: float) -> bytes:
        raw = self._raw
        declared = raw.content_length
        if declared is not None and declared > limit:
            raise _too_long(limit)
        if not raw.can_read_body:
            return b""
        if raw.headers.get("Expect", "").lower() == "100-continue" and raw.transport is not None:
            raw.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        chunks: list[bytes] = []
        size = 0
        try:
            if declared is not None and raw.content.is_eof():
                # It came together with the head: nothing to wait for, so no timer. `declared` is within the limit.
                return raw.content.read_nowait()
            async with asyncio.timeout(idle) as patience:
                while chunk := await raw.content.readany():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > limit:
                        raise _too_long(limit)
                    patience.reschedule(asyncio.get_running_loop().time() + idle)
        except TimeoutError:
            raise BodyError(f"Nothing more of the request body came for {idle:g} s.", 408) from None
        except web.RequestPayloadError as e:
            raise BodyError(f"The request body is not valid HTTP: {e}.", 400) from None
        except ConnectionError:
            raise ClientGone("the client left while sending its request") from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class AiohttpReply:
    """`ClientReply` of one aiohttp request. A client that takes nothing for `idle` seconds counts as gone."""

    __slots__ = ("_idle", "_raw", "_response")

    def __init__(self, raw: web.BaseRequest, idle: float) -> None:
        self._raw = raw
        self._idle = idle
        self._response: web.StreamResponse | None = None

    @property
    def status(self) -> int:
        return self._response.status if self._response is not None else 0

    @property
    def response(self) -> web.StreamResponse:
        """What aiohttp wants back from its handler."""
        if self._response is None:
            self._response = web.Response(status=500)
        return self._response

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        self._response = web.Response(status=status, headers=CIMultiDict(headers), body=body)
        if self._may_wait(body):
            await self._in_time(self._send_whole(self._response))
        # Otherwise aiohttp sends it after the handler's return.

    async def _send_whole(self, response: web.Response) -> None:
        await response.prepare(self._raw)
        await response.write_eof()

    async def start(self, status: int, headers: Headers) -> None:
        self._response = web.StreamResponse(status=status, headers=CIMultiDict(headers))
        try:
            await self._response.prepare(self._raw)
        except ConnectionError:
            raise ClientGone("the client left") from None

    async def write(self, chunk: bytes) -> None:
        assert self._response is not None
        if self._may_wait(chunk):
            await self._in_time(self._response.write(chunk))
            return
        try:
            await self._response.write(chunk)
        except ConnectionError:
            raise ClientGone("the client left") from None

    async def finish(self) -> None:
        assert self._response is not None
        await self._in_time(self._response.write_eof())

    def _may_wait(self, data: bytes) -> bool:
        """Whether writing `data` could wait for the client, so that it needs a timer."""
        transport = self._raw.transport
        return transport is None or transport.get_write_buffer_size() + len(data) >= UNHURRIED_BYTES

    async def _in_time(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._idle):
                await sending
        except ConnectionError:
            raise ClientGone("the client left") from None
        except TimeoutError:
            self.abort()
            raise ClientGone(f"the client read nothing for {self._idle:g} s") from None

    def abort(self) -> None:
        if self._raw.transport is not None:
            self._raw.transport.abort()


class _Server(web.Server):
    """Notices clients whose host vanished while they wait for an answer."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        keep_alive(transport.get_extra_info("socket"))


class AiohttpServer:
    """`HttpServer` of one listening address."""

    def __init__(self, handler: Handler, *, host: str, port: int, idle: float, grace: float) -> None:
        self._handler = handler
        self._grace = grace
        self._host = host
        self._port = port
        self._idle = idle
        self._runner: web.ServerRunner | None = None

    async def start(self) -> int:
        server = _Server(
            self._serve,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            read_bufsize=READ_BUFFER_BYTES,
            lingering_time=1.0,
            logger=_log,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=self._grace)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=BACKLOG)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _serve(self, raw: web.BaseRequest) -> web.StreamResponse:
        reply = AiohttpReply(raw, self._idle)
        await self._handler(AiohttpRequest(raw), reply)
        return reply.response


def _too_long(limit: int) -> BodyError:
    return BodyError(
        f"The request body is longer than the router's limit of {limit} bytes; raise --max-body-mib to allow it.", 413
    )
