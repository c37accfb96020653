"""A worker that costs almost nothing: fixed answers from one `asyncio.Protocol`, for measuring what is before it.

Run as `python -m benchmarks.mock_upstream PORT`. It answers what routers ask (health, models, version, metrics),
completions and chats. A prefill leg gets transfer parameters; a stream gets `CHUNKS` events, one each millisecond, with
token ids if it asks for them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, cast

import uvloop

CHUNKS = 16

_CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "mock",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 16}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 20, "completion_tokens": 16, "total_tokens": 36},
}
_TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(180))],
    "remote_engine_id": "0f3c6a2e-8a4e-4c61-9c4b-1d2f3a4b5c6d",
    "remote_request_id": "chatcmpl-1-prefill",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def _json(value: Any) -> bytes:
    body = json.dumps(value).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


def _text(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


_ANSWER = _json(_CHAT)
_PREFILL_ANSWER = _json({**_CHAT, "kv_transfer_params": _TRANSFER})
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _event(choice: dict[str, Any], **more: Any) -> bytes:
    """An event of a chat's stream in vLLM's form."""
    value = {
        "id": "chatcmpl-0f3c6a2e8a4e4c61",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "mock",
        "choices": [{"index": 0, **choice}],
        **more,
    }
    return _chunk(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


def _stream_of(prompt: list[int] | None, token: list[int] | None) -> list[bytes]:
    """All events; without ids there is null in their place."""
    role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    word = {"delta": {"content": "word "}, "logprobs": None, "finish_reason": None, "token_ids": token}
    last = {**word, "finish_reason": "length", "stop_reason": None, "token_ids": token}
    head = _event(role, prompt_token_ids=prompt, prompt_text=None)
    return [head, *[_event(word)] * (CHUNKS - 2), _event(last)]


_EVENTS = _stream_of(None, None)
_EVENTS_WITH_IDS = _stream_of(list(range(20)), [12345])
_STREAM_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_MODEL = {"id": "mock", "object": "model", "created": 1, "owned_by": "vllm", "root": "mock", "max_model_len": 32768}
_GETS = {
    b"/v1/models": _json({"object": "list", "data": [_MODEL]}),
    b"/version": _json({"version": "0.32.0"}),
    b"/get_model_info": _json({"model_path": "mock", "is_generation": True}),
    b"/model_info": _json({"model_path": "mock", "is_generation": True}),
    b"/get_server_info": _json({"version": "0.5.0", "served_model_name": "mock", "tp_size": 1, "dp_size": 1}),
    b"/server_info": _json({"version": "0.5.0", "served_model_name": "mock", "tp_size": 1, "dp_size": 1}),
    b"/metrics": _text(b'vllm:cache_config_info{block_size="32",engine="0"} 1.0\n'),
}


class MockUpstream(asyncio.Protocol):
    """One connection, requests one after the other."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, target: bytes, body: bytes) -> None:
        assert self._transport is not None
        if not body:
            self._transport.write(_GETS.get(target.partition(b"?")[0], _text(b"")))
        elif b'"do_remote_decode":true' in body.replace(b": ", b":"):
            self._transport.write(_PREFILL_ANSWER)
        elif b'"stream": true' in body or b'"stream":true' in body:
            self._transport.write(_STREAM_HEAD)
            events = _EVENTS_WITH_IDS if b'"return_token_ids":true' in body else _EVENTS
            asyncio.get_running_loop().call_soon(self._stream, events, 0)
        else:
            self._transport.write(_ANSWER)

    def _stream(self, events: list[bytes], sent: int) -> None:
        if self._transport is None:
            return
        if sent < len(events):
            self._transport.write(events[sent])
            # Real tokens come one by one; without a pause the kernel would join them into one read.
            asyncio.get_running_loop().call_later(0.001, self._stream, events, sent + 1)
        else:
            self._transport.write(_STREAM_END)


async def serve(port: int) -> None:
    """Until the process is ended."""
    server = await asyncio.get_running_loop().create_server(MockUpstream, "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
