"""A closed-loop HTTP load: N connections, each sending a request again as soon as the one before is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

DEADLINE_S = 120.0


@dataclass(slots=True)
class Timings:
    """Seconds per request: to the first byte of the answer's body, and to its end."""

    first_byte: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


class LoadError(Exception):
    """The server answered with an error or hung up."""


class _Connection(asyncio.Protocol):
    def __init__(
        self, requests: Sequence[bytes], left: list[int], timings: Timings, done: asyncio.Future[None]
    ) -> None:
        self._requests = requests
        self._left = left
        self._timings = timings
        self._done = done
        self._received = bytearray()
        self._sent_at = 0.0
        self._first_at = 0.0
        self._length = -1
        self._body = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        if self._left[0] <= 0:
            self._transport.close()
            if not self._done.done():
                self._done.set_result(None)
            return
        self._left[0] -= 1
        self._received.clear()
        self._first_at = 0.0
        self._length = -1
        self._sent_at = time.perf_counter()
        self._transport.write(self._requests[self._left[0] % len(self._requests)])

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._received += data
        if self._length < 0:
            self._read_head()
        if self._length < 0 or len(self._received) <= self._body:
            return
        self._first_at = self._first_at or now
        chunked = self._length == 0
        if self._received.endswith(b"0\r\n\r\n") if chunked else len(self._received) >= self._length:
            self._timings.first_byte.append(self._first_at - self._sent_at)
            self._timings.total.append(now - self._sent_at)
            self._send()

    def _read_head(self) -> None:
        """Set `_length` to the answer's whole length, or to 0 when it comes in chunks."""
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._received[:end]).lower()
        if not head.startswith(b"http/1.1 200"):
            self._fail(LoadError(f"the server answered {bytes(self._received[:400])!r}"))
            return
        _, found, rest = head.partition(b"content-length:")
        self._body = end + 4
        self._length = self._body + int(rest.split(b"\r\n", 1)[0]) if found else 0

    def _fail(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(LoadError(f"the connection was closed: {exc}"))


def http_request(path: str, body: bytes) -> bytes:
    """A POST request as bytes."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"User-Agent: benchmark\r\nAccept: */*\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def run_load(port: int, request: bytes | Sequence[bytes], *, requests: int, connections: int) -> Timings:
    """Send `requests` requests over `connections` connections to 127.0.0.1; several different ones in turn.

    Raises:
        LoadError: any answer was not 200, or a connection broke.
        TimeoutError: not finished within `DEADLINE_S`.
    """
    loop = asyncio.get_running_loop()
    timings = Timings()
    left = [requests]
    sent = [request] if isinstance(request, bytes) else request
    done: list[asyncio.Future[None]] = [loop.create_future() for _ in range(connections)]
    async with asyncio.timeout(DEADLINE_S):
        for future in done:
            await loop.create_connection(
                lambda future=future: _Connection(sent, left, timings, future),  # type: ignore[misc]
                "127.0.0.1",
                port,
            )
        await asyncio.gather(*done)
    return timings
