"""Answers that the router makes itself: JSON, and errors in OpenAI's shape as vLLM gives them."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_pd.router.transport import ClientReply, Headers, header

_ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


def error_object(status: int, message: str) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    kind = _ERROR_TYPES.get(status, "Error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def sse_error(status: int, message: str) -> bytes:
    """A server-sent event that ends a stream with an error. Begins with a blank line: the last event may be torn."""
    return b"\n\ndata: " + msgspec.json.encode(error_object(status, message)) + b"\n\n"


async def send_json(reply: ClientReply, status: int, value: Any, extra: Headers | None = None) -> None:
    """A complete JSON answer."""
    await reply.send(status, [("Content-Type", "application/json"), *(extra or [])], msgspec.json.encode(value))


async def send_error(reply: ClientReply, status: int, message: str, extra: Headers | None = None) -> None:
    """A complete error answer. `message` is one sentence: cause and remedy."""
    headers = list(extra or [])
    if status == 503 and header(headers, "retry-after") is None:
        headers.append(("Retry-After", "1"))
    await send_json(reply, status, error_object(status, message), headers)
