"""The seam between the router's logic and its HTTP stack.

The logic knows only the Protocols below; `aiohttp_server` and `aiohttp_client` implement them. A leaner data path
replaces one of those files and nothing else. Bodies are bytes, headers are ordered pairs that keep case and repeats.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from vllm_pd.errors import PDError

Headers = list[tuple[str, str]]


def header(headers: Iterable[tuple[str, str]], name: str) -> str | None:
    """The first value of `name` (given in lower case), or None."""
    for key, value in headers:
        if key.lower() == name:
            return value
    return None


def retry_after(headers: Iterable[tuple[str, str]]) -> float | None:
    """The seconds of a `Retry-After` header; None where there is none, or it names a date."""
    text = (header(headers, "retry-after") or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


class UpstreamError(PDError):
    """A worker did not give a usable answer."""


class ConnectFailed(UpstreamError):
    """No connection was made (refused, unreachable, name, TLS, or too slow): the worker saw nothing of the request."""


class ConnectTimeout(ConnectFailed):
    """No connection was made in time, and nobody refused it either."""


class Disconnected(UpstreamError):
    """The connection ended after the request was sent and before the answer's head arrived."""


class FirstByteTimeout(UpstreamError):
    """The worker took the request and did not begin to answer in time."""


class StreamLost(UpstreamError):
    """The answer began and then broke off, or nothing came for the idle time."""


class StreamStalled(StreamLost):
    """The connection stands, but nothing came for the idle time."""


class WorkerDown(StreamLost):
    """The worker, or its part that computes, was found to give no sign of life; or the leg was lost on its way there.

    Raised at any time between sending a request and the end of its answer.
    """


class SourceDown(StreamLost):
    """The worker that holds the KV which the leg reads was found to give no sign of life."""


class HandedOver(StreamLost):
    """The worker is to do something else, and another one goes on with the stream."""


class RouterStopping(StreamLost):
    """This router is being stopped and the grace time is over."""


class Wait:
    """What a leg waits for as seen from outside: since when nothing has come, and a way to end that."""

    __slots__ = ("_wake", "error", "since")

    def __init__(self) -> None:
        self.since = 0.0
        """When the present wait began, in seconds of the running loop's clock; 0 while nothing is waited for."""
        self.error: UpstreamError | None = None
        """With which it was ended."""
        self._wake: Callable[[], None] | None = None

    def end(self, error: UpstreamError) -> None:
        """Have the present wait, or the next one, raise `error`. Of several calls the first counts."""
        if self.error is None:
            self.error = error
            if self._wake is not None:
                self._wake()

    def woken_by(self, wake: Callable[[], None]) -> None:
        """For the transport: `wake` ends what is waited for now."""
        self._wake = wake
        if self.error is not None:
            wake()


class BodyError(PDError):
    """The client's body is unusable; `status` is the HTTP status that says why."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ClientGone(PDError):
    """The client's connection is gone or it stopped reading for the idle time."""


class UpstreamResponse(Protocol):
    """An answer whose head has arrived. `close` must always be called; it is idempotent."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    async def next_chunk(self, idle: float) -> bytes:
        """What has arrived, at least one byte, as soon as it is there; empty at the end.

        Raises:
            StreamLost: the connection broke.
            StreamStalled: nothing came for `idle` seconds.
            UpstreamError: the one with which the request's `Wait` was ended.
        """

    async def read(self, limit: int, deadline: float) -> bytes:
        """The whole body, at most `limit` bytes, within `deadline` seconds.

        Raises:
            StreamLost: it broke off, was too long, or too slow.
            UpstreamError: the one with which the request's `Wait` was ended.
        """

    def close(self) -> None:
        """Drop the answer. One that has not ended is cancelled: its connection is closed at once."""


class Upstream(Protocol):
    """The client side: keeps connections to workers."""

    async def open(
        self,
        method: str,
        base: str,
        target: str,
        headers: Headers,
        body: bytes | None,
        first_byte: float,
        wait: Wait | None = None,
    ) -> UpstreamResponse:
        """Send a request to `base` + `target` and wait for the answer's head for at most `first_byte` seconds.

        Cancelling the call closes the connection. `wait` shows this wait and those for the answer's body.

        Raises:
            ConnectFailed, Disconnected, FirstByteTimeout: see there.
            UpstreamError: the one with which `wait` was ended.
        """

    async def close(self) -> None:
        """Close every connection. Idempotent."""


class ClientRequest(Protocol):
    """A request whose head has arrived."""

    @property
    def method(self) -> str: ...

    @property
    def path(self) -> str:
        """Decoded path, without the query."""

    @property
    def target(self) -> str:
        """Path and query exactly as the client sent them, beginning with a slash."""

    @property
    def headers(self) -> Headers: ...

    async def body(self, limit: int, idle: float) -> bytes:
        """The whole body.

        Raises:
            BodyError: longer than `limit` bytes (413), or nothing came for `idle` seconds (408).
            ClientGone: the client left while sending.
        """


class ClientReply(Protocol):
    """The answer to one request. A client that leaves cancels the handler's task."""

    @property
    def status(self) -> int:
        """The status sent, 0 while nothing was sent."""

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        """A complete answer in one piece; a long one waits until the client has taken it. Raises ClientGone."""

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head now; `write` and `finish` follow. Raises ClientGone."""

    async def write(self, chunk: bytes) -> None:
        """Send a piece now; returns when the client's buffer has room. Raises ClientGone."""

    async def finish(self) -> None:
        """End the answer properly. Raises ClientGone."""

    def abort(self) -> None:
        """Cut the connection, so that the client sees an answer that broke off. Idempotent."""


Handler = Callable[[ClientRequest, ClientReply], Awaitable[None]]


class HttpServer(Protocol):
    """The server side. Three phases: `start`, requests, `stop`."""

    async def start(self) -> int:
        """Listen; returns the bound port. Raises OSError."""

    async def stop(self) -> None:
        """Stop accepting, give requests in flight their grace time, then cut them. Idempotent."""
