"""`Upstream` over aiohttp's client: one keep-alive pool without limits, no decompression, no redirects."""

from __future__ import annotations

import asyncio
import socket
import ssl

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from vllm_pd.router.keepalive import keep_alive
from vllm_pd.router.transport import (
    ConnectFailed,
    ConnectTimeout,
    Disconnected,
    FirstByteTimeout,
    Headers,
    StreamLost,
    StreamStalled,
    UpstreamError,
    Wait,
)

# uvicorn, vLLM's server, drops idle connections after 5 s. Leaving earlier avoids sending into a closing connection.
KEEPALIVE_S = 4.0
MAX_HEADER_BYTES = 64 * 1024
READ_BUFFER_BYTES = 256 * 1024
MAX_CACHED_URLS = 1024
OWN_DELAY_S = 0.05
"""A timer that comes later than this was held up by what else its process had to do."""
# Only what the client or the router named goes to the worker.
_NO_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


def tls_context(ca_file: str, insecure: bool) -> ssl.SSLContext:
    """How workers with https URLs are checked: against `ca_file` if given, else the system's authorities.

    Raises:
        OSError, ssl.SSLError: `ca_file` cannot be read or holds no certificate.
    """
    context = ssl.create_default_context(cafile=ca_file or None)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class AiohttpResponse:
    """`UpstreamResponse` of one aiohttp response.

    One timer watches a whole stream: setting and clearing one for each chunk would cost a tenth of the router's time.
    """

    __slots__ = ("_headers", "_idle", "_response", "_stalled", "_wait", "_watch", "status")

    def __init__(self, response: aiohttp.ClientResponse, wait: Wait) -> None:
        self._response = response
        self._wait = wait
        # Wakes the reader with an error.
        wait.woken_by(response.close)
        self._headers: Headers | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._idle = 0.0
        self._stalled = False
        self.status = response.status

    @property
    def headers(self) -> Headers:
        if self._headers is None:
            self._headers = list(self._response.headers.items())
        return self._headers

    async def next_chunk(self, idle: float) -> bytes:
        content = self._response.content
        try:
            if chunk := content.read_nowait():
                return chunk
            loop = asyncio.get_running_loop()
            self._wait.since = loop.time()
            if self._watch is None or idle < self._idle:
                self._stop_watching()
                self._watch = loop.call_later(idle, self._look, loop)
            self._idle = idle
            return await content.readany()
        except aiohttp.ClientError as e:
            if self._stalled:
                raise StreamStalled(f"nothing came for {idle:g} s") from None
            raise self._lost(e) from None
        finally:
            self._wait.since = 0.0

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """The timer ran out: look again later, unless the present wait has lasted too long."""
        self._watch = None
        if not self._wait.since:
            return
        left = self._wait.since + self._idle - loop.time()
        if left > 0:
            self._watch = loop.call_later(left, self._look, loop)
        else:
            self._stalled = True
            self._response.close()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def read(self, limit: int, deadline: float) -> bytes:
        body = bytearray()
        wait, loop = self._wait, asyncio.get_running_loop()
        wait.since = loop.time()
        try:
            async with asyncio.timeout(deadline):
                while chunk := await self._response.content.readany():
                    body += chunk
                    wait.since = loop.time()
                    if len(body) > limit:
                        raise StreamLost(f"the answer is longer than {limit} bytes")
        except aiohttp.ClientError as e:
            raise self._lost(e) from None
        except TimeoutError:
            raise StreamLost(f"the answer was not complete after {deadline:g} s") from None
        finally:
            wait.since = 0.0
        return bytes(body)

    def _lost(self, error: aiohttp.ClientError) -> UpstreamError:
        return self._wait.error or StreamLost(f"the connection broke off ({_cause(error)})")

    def close(self) -> None:
        self._stop_watching()
        self._response.close()


class AiohttpUpstream:
    """`Upstream` of one `aiohttp.ClientSession`. Make it inside the running loop."""

    def __init__(self, *, connect_timeout: float, tls: ssl.SSLContext | None = None) -> None:
        connector = aiohttp.TCPConnector(
            limit=0,
            limit_per_host=0,
            keepalive_timeout=KEEPALIVE_S,
            ttl_dns_cache=30,
            ssl=tls if tls is not None else True,
            socket_factory=_new_socket,
        )
        self._connect_timeout = connect_timeout
        self._urls: dict[str, URL] = {}
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_NO_AUTO_HEADERS,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            read_bufsize=READ_BUFFER_BYTES,
        )

    async def open(
        self,
        method: str,
        base: str,
        target: str,
        headers: Headers,
        body: bytes | None,
        first_byte: float,
        wait: Wait | None = None,
    ) -> AiohttpResponse:
        wait = wait if wait is not None else Wait()
        if wait.error is not None:
            raise wait.error
        try:
            url = self._url(base + target)
        except ValueError as e:
            raise ConnectFailed(f"its URL is unusable: {e}") from None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(first_byte) as patience:
                wait.since = began = loop.time()
                wait.woken_by(lambda: patience.reschedule(loop.time()))
                try:
                    response = await self._request(method, url, headers, body)
                except aiohttp.ConnectionTimeoutError:
                    # A process that had no time for its loop sees the end of the time first and the connection, which
                    # was there long before, never. It says nothing of the worker; nothing was sent yet.
                    if loop.time() - began < self._connect_timeout + OWN_DELAY_S:
                        raise
                    response = await self._request(method, url, headers, body)
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as e:
            raise ConnectFailed(_cause(e)) from None
        except aiohttp.ConnectionTimeoutError:
            raise ConnectTimeout(f"no connection within {self._connect_timeout:g} s") from None
        except aiohttp.ClientError as e:
            raise Disconnected(_cause(e)) from None
        except TimeoutError:
            raise wait.error or FirstByteTimeout(f"no answer within {first_byte:g} s") from None
        finally:
            wait.since = 0.0
        return AiohttpResponse(response, wait)

    async def _request(self, method: str, url: URL, headers: Headers, body: bytes | None) -> aiohttp.ClientResponse:
        return await self._session.request(
            method,
            url,
            headers=CIMultiDict(headers),
            data=body,
            allow_redirects=False,
        )

    def _url(self, text: str) -> URL:
        """Raises ValueError."""
        url = self._urls.get(text)
        if url is None:
            # Queries make their number unbounded; starting over is rare and cheap.
            if len(self._urls) >= MAX_CACHED_URLS:
                self._urls.clear()
            url = URL(text, encoded=True)
            # yarl looks at the port only when asked; here the error still has a place to go.
            _ = url.port
            self._urls[text] = url
        return url

    async def close(self) -> None:
        await self._session.close()


def _new_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    keep_alive(sock)
    return sock


def _cause(error: BaseException) -> str:
    """The bottom of an aiohttp error in a few words, without its wrappers."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its TLS certificate is not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    return str(error) or type(error).__name__
