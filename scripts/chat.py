"""A streaming OpenAI chat request with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

READ_TIMEOUT_S = 120.0


class ChatError(Exception):
    """The server refused, broke off or did not answer; one sentence."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. Times are seconds from sending the request."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    first_s: float
    total_s: float


def stream_chat(base_url: str, model: str, content: str, max_tokens: int, on_piece: Callable[[str], None]) -> Answer:
    """Ask one question, greedily; `on_piece` gets each piece of the answer as it arrives.

    Raises:
        ChatError: no complete answer.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=READ_TIMEOUT_S)
    try:
        return _exchange(connection, json.dumps(body), on_piece)
    except (OSError, http.client.HTTPException) as e:
        raise ChatError(f"{base_url} broke off: {type(e).__name__}: {e}.") from None
    finally:
        connection.close()


def _exchange(connection: http.client.HTTPConnection, body: str, on_piece: Callable[[str], None]) -> Answer:
    started = time.monotonic()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        detail = response.read(2000).decode(errors="replace")
        raise ChatError(f"The server answered {response.status}: {detail}")
    pieces: list[str] = []
    finish, first_s, usage = "", 0.0, {"prompt_tokens": 0, "completion_tokens": 0}
    for line in response:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            return Answer(
                "".join(pieces),
                finish,
                usage["prompt_tokens"],
                usage["completion_tokens"],
                first_s,
                time.monotonic() - started,
            )
        event = json.loads(data)
        if "error" in event:
            raise ChatError(f"The server sent an error: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            finish = choice.get("finish_reason") or finish
            if piece := choice["delta"].get("content"):
                first_s = first_s or time.monotonic() - started
                pieces.append(piece)
                on_piece(piece)
    raise ChatError("The stream ended before the answer was complete.")
