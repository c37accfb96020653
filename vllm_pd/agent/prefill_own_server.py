"""Sends prefill work to this process's own HTTP server: it then takes the way of every other request through vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
from yarl import URL

from vllm_pd.agent.readiness import OwnServer
from vllm_pd.errors import PDError

MAX_ANSWER = 64 * 1024 * 1024
"""Bytes. Hand-off parameters list every block of the prompt."""
_CONNECT_S = 5.0
# uvicorn drops idle connections after 5 s. Leaving earlier avoids sending into a closing connection.
_KEEPALIVE_S = 3.0
_NO_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class PostFailed(PDError):
    """The server gave no answer."""


@dataclass(frozen=True, slots=True)
class Posted:
    """An answer of the server."""

    status: int
    body: bytes
    retry_after: str | None = None


class OwnApi:
    """Posts to one server. Made at its first use, and used and closed, in one event loop."""

    def __init__(self, server: OwnServer) -> None:
        self._server = server
        self._session: aiohttp.ClientSession | None = None
        host = f"[{server.address}]" if ":" in server.address else server.address
        scheme = "https" if server.tls else "http"
        self._base = f"{scheme}://localhost" if server.uds else f"{scheme}://{host}:{server.port}"

    async def post(self, path: str, headers: list[tuple[str, str]], body: bytes, timeout_s: float) -> Posted:
        """Send it and wait for the whole answer. Cancelling it closes the connection, and vLLM then gives it up.

        Raises:
            PostFailed: there was no answer, or none within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._post(path, headers, body)
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    # An idle connection that the server was closing, most likely; computing a prompt twice is harmless.
                    return await self._post(path, headers, body)
        except TimeoutError:
            raise PostFailed(f"the server of the worker did not answer within {timeout_s:.3g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise PostFailed(f"the server of the worker gave no answer ({e or type(e).__name__})") from None

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, path: str, headers: list[tuple[str, str]], body: bytes) -> Posted:
        if self._session is None:
            self._session = self._open()
        url = URL(self._base + path, encoded=True)
        async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
            chunks, size = [], 0
            async for chunk in answer.content.iter_any():
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_ANSWER:
                    raise PostFailed(f"the answer of the worker's server is longer than {MAX_ANSWER} bytes")
            return Posted(answer.status, b"".join(chunks), answer.headers.get("Retry-After"))

    def _open(self) -> aiohttp.ClientSession:
        server, context = self._server, self._server.context()
        ssl = context if context is not None else True
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(server.uds, limit=0, keepalive_timeout=_KEEPALIVE_S)
            if server.uds
            else aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=ssl)
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=True,
            skip_auto_headers=_NO_AUTO_HEADERS,
            trust_env=False,
        )
