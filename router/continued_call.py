"""Both ends of a call that goes on with a stream: it takes the client's headers, it writes into that one's stream."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vllm_pd.router.call import COMPLETION
from vllm_pd.router.replies import sse_error
from vllm_pd.router.transport import ClientReply, Headers


class _Error(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Error


_error = msgspec.json.Decoder(_ErrorBody)


class ContinuedRequest:
    """`ClientRequest` of a continuation: the client's headers with another body."""

    __slots__ = ("_body", "headers")
    method = "POST"
    path = target = COMPLETION.path

    def __init__(self, body: bytes, headers: Headers) -> None:
        self._body = body
        self.headers = headers

    async def body(self, limit: int, idle: float) -> bytes:
        return self._body


class StreamReply:
    """`ClientReply` of a continuation: the rest of a stream that has begun. An error becomes its last event.

    Args:
        problem: why the stream broke off, in one sentence.
    """

    __slots__ = ("_clock", "_inner", "_problem", "began", "failed")

    def __init__(self, inner: ClientReply, problem: str, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._problem = problem
        self._clock = clock
        self.began = 0.0
        """When the first bytes came, by `clock`."""
        self.failed = False
        """Whether an error ended the stream."""

    @property
    def status(self) -> int:
        return self._inner.status

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        self.failed = True
        try:
            said = _error.decode(body).error.message
        except msgspec.DecodeError:
            said = f"status {status}"
        await self._inner.write(sse_error(status, f"{self._problem} It could not be continued elsewhere: {said}"))
        await self._inner.finish()

    async def start(self, status: int, headers: Headers) -> None:
        self.began = self._clock()

    async def write(self, chunk: bytes) -> None:
        await self._inner.write(chunk)

    async def finish(self) -> None:
        await self._inner.finish()

    def abort(self) -> None:
        self._inner.abort()
