"""Which headers cross the router. Everything does, except what belongs to one connection (RFC 9110, 7.6.1)."""

from __future__ import annotations

from vllm_pd.router.transport import Headers, header

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The router answers `Expect` itself and writes its own host and length.
_OWN_OF_REQUEST = _HOP_BY_HOP | {"host", "content-length", "expect"}

REQUEST_ID = "X-Request-Id"
RANK_HEADER = "X-data-parallel-rank"
"""By it vLLM's API server passes a request to one of its engines."""

_USUAL_CONNECTION = frozenset({"close", "keep-alive", ""})


def _without(headers: Headers, drop: frozenset[str]) -> Headers:
    """`headers` without those in `drop` and those that a `Connection` header declares to be hop-by-hop."""
    out: Headers = []
    named: set[str] = set()
    for pair in headers:
        name = pair[0].lower()
        if name == "connection":
            named.update(token.strip().lower() for token in pair[1].split(","))
        elif name not in drop:
            out.append(pair)
    named -= _USUAL_CONNECTION
    return [pair for pair in out if pair[0].lower() not in named] if named else out


def rank_in(headers: Headers) -> int | None:
    """The engine that is named; None if none is, or not by a number."""
    rank = header(headers, RANK_HEADER.lower()) or ""
    return int(rank) if rank.isdecimal() else None


def to_worker(headers: Headers, *, worker_key: str, request_id: str | None) -> Headers:
    """The client's headers as a worker gets them.

    `Authorization` is replaced only when `worker_key` is set; `X-Request-Id` only when `request_id` is given.
    """
    out = _without(headers, _OWN_OF_REQUEST)
    if worker_key:
        out = [pair for pair in out if pair[0].lower() != "authorization"]
        out.append(("Authorization", f"Bearer {worker_key}"))
    if request_id is not None:
        out = [pair for pair in out if pair[0].lower() != "x-request-id"]
        out.append((REQUEST_ID, request_id))
    return out


def to_client(headers: Headers) -> Headers:
    """A worker's headers as the client gets them."""
    return _without(headers, _HOP_BY_HOP)
