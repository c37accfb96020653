"""Which headers cross the router. Everything does, except what belongs to one connection (RFC 9110, 7.6.1)."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_pd.router.transport import Headers

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


def _named_by_connection(headers: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Further headers that a `Connection` header declares to be hop-by-hop."""
    names: set[str] = set()
    for key, value in headers:
        if key.lower() == "connection":
            names.update(token.strip().lower() for token in value.split(","))
    return frozenset(names - {"close", "keep-alive", ""})


def to_worker(headers: Headers, *, worker_key: str, request_id: str | None) -> Headers:
    """The client's headers as a worker gets them.

    `Authorization` is replaced only when `worker_key` is set; `X-Request-Id` only when `request_id` is given.
    """
    drop = _OWN_OF_REQUEST | _named_by_connection(headers)
    if worker_key:
        drop |= {"authorization"}
    if request_id is not None:
        drop |= {REQUEST_ID.lower()}
    out = [pair for pair in headers if pair[0].lower() not in drop]
    if worker_key:
        out.append(("Authorization", f"Bearer {worker_key}"))
    if request_id is not None:
        out.append((REQUEST_ID, request_id))
    return out


def to_client(headers: Headers) -> Headers:
    """A worker's headers as the client gets them."""
    drop = _HOP_BY_HOP | _named_by_connection(headers)
    return [pair for pair in headers if pair[0].lower() not in drop]
