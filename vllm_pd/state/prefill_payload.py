"""What a prefill job asks of whoever claims it, and what its result says. Pure.

Both are msgpack; decoders ignore fields that a newer version added. The store never sees a client's credentials: the
claiming worker asks its own server with its own key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

_CREDENTIALS = frozenset(
    {"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key", "x-auth-token", "x-amz-security-token"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """One HTTP request (POST) that the claiming worker sends to its own server."""

    path: str
    """Target with its query, as `/v1/chat/completions`."""
    headers: list[tuple[str, str]]
    """As for the worker itself, but see `without_credentials`. `X-data-parallel-rank` counts only where the job is done
    by the worker in whose stream it waited."""
    body: bytes
    """JSON of the prefill leg, its `priority` included."""
    deadline_ms: int
    """When nobody waits for the result any more, milliseconds since 1970 by the router's clock."""
    timeout_ms: int
    """How long the work itself may take, by the clock of whoever does it."""

    def __post_init__(self) -> None:
        # `//host/path` and `http://host/` would name another server.
        if not self.path.startswith("/") or self.path.startswith("//"):
            raise ValueError(f"path must begin with one slash, got {self.path[:40]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAnswer:
    """What the server of the worker answered; also when it refused the request as the client's mistake (4xx)."""

    status: int
    """Of HTTP."""
    body: bytes
    """The JSON answer. With status 200 it holds the hand-off parameters (`router.legs.transfer_params`)."""
    computed_ms: int
    """From the request to its answer, by the worker's clock."""


_request = msgspec.msgpack.Decoder(PrefillRequest)
_answer = msgspec.msgpack.Decoder(PrefillAnswer)


def encode_request(request: PrefillRequest) -> bytes:
    return msgspec.msgpack.encode(request)


def decode_request(data: bytes) -> PrefillRequest:
    """Raises ValueError when `data` is no request."""
    return _request.decode(data)


def encode_answer(answer: PrefillAnswer) -> bytes:
    return msgspec.msgpack.encode(answer)


def decode_answer(data: bytes) -> PrefillAnswer:
    """Raises ValueError when `data` is no answer."""
    return _answer.decode(data)


def without_credentials(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers that may be put into the store."""
    return [pair for pair in headers if pair[0].lower() not in _CREDENTIALS]
