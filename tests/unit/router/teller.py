"""A worker's hook that streams as vLLM does, byte for byte in its form, and breaks off as it is told.

Its answers are a fixed story: the token at place k is `FIRST + k`, and a prompt that ends with tokens of the story is
gone on with. Some characters take two tokens. The first of them comes without text, and whoever asks to go on from
there gets the whole prompt once more as text, as with vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.unit.router.fake_worker import Seen

FIRST = 1000
PIECES = (
    "Once",
    " upon",
    " a",
    "",
    " naïve",
    " time",
    " ",
    "",
    "灯",
    ' said "',
    '"token_ids":[7]',
    "\n\n",
    " the",
    " end",
)
PROMPT = list(range(10, 10 + 40))


def piece(place: int) -> str:
    """The text that comes with the token at this place."""
    return PIECES[place % len(PIECES)]


def text_of(count: int) -> str:
    """The text of the first `count` tokens."""
    return "".join(piece(place) for place in range(count))


@dataclass
class Break:
    """How a stream ends early: after so many of its own tokens."""

    after: int
    how: str
    """`cut`, `eof`, `stall`, `abort` (vLLM's finish reason) or `error` (an event)."""
    torn: bytes = b""
    """Part of an event that is sent before."""


@dataclass
class Teller:
    """Use `Teller(...).hook` as the hook of a FakeWorker. `breaks` are taken one for each request, then none."""

    breaks: list[Break] = field(default_factory=list)
    merge: int = 1
    """Tokens an event."""
    gives_ids: bool = True
    parses: bool = False
    """Whether its chats go through a parser of reasoning."""
    gate: asyncio.Event | None = None
    """Waited for before the last token."""
    id: str = "first"
    detokenized: list[list[int]] = field(default_factory=list)

    async def hook(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        if request.path == "/detokenize":
            self.detokenized.append(body["tokens"])
            tokens = [token - FIRST for token in body["tokens"] if token >= FIRST]
            shown = "".join(piece(place) for place in tokens)
            return web.json_response({"prompt": shown + ("\ufffd" if piece(tokens[-1]) == "" else "")})
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return await request.app[next(iter(request.app))].answer(request, seen)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        broken = self.breaks.pop(0) if self.breaks else None
        events = self.events(body, chat="chat" in request.path, broken=broken)
        for number, event in enumerate(events):
            if self.gate is not None and number == len(events) - 2:
                await self.gate.wait()
            await response.write(event)
        if broken is not None and broken.how in ("cut", "stall"):
            await response.write(broken.torn)
            if broken.how == "stall":
                await asyncio.Event().wait()
            await asyncio.sleep(0.05)
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write_eof()
        return response

    def events(self, body: dict[str, Any], *, chat: bool, broken: Break | None = None) -> list[bytes]:
        """The events of an answer, up to where it breaks."""
        given = body.get("prompt")
        prompt = given if isinstance(given, list) else PROMPT
        told = 0
        while told < len(prompt) and prompt[-1 - told] >= FIRST:
            told += 1
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or (100 - len(prompt) if chat else 16)
        options = body.get("stream_options") or {}
        shows, continuous = (
            body.get("return_token_ids") is True and self.gives_ids,
            options.get("continuous_usage_stats"),
        )
        base = {
            "id": self.id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 7,
            "model": "m",
        }

        def usage(count: int) -> dict[str, Any]:
            return {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + count, "completion_tokens": count}

        out: list[bytes] = []
        ids = {"prompt_token_ids": prompt if shows else None}
        if chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            out.append(
                _sse(
                    {
                        **base,
                        "choices": [role],
                        **({"usage": usage(0)} if continuous else {}),
                        **ids,
                        "prompt_text": None,
                    }
                )
            )
        count = 0
        while count < limit:
            step = min(self.merge, limit - count, (broken.after if broken else limit) - count)
            if step == 0:
                break
            places = range(told + count, told + count + step)
            count += step
            text = "".join(piece(place) for place in places)
            if told and count == step and piece(told - 1) == "":
                text = f"<the whole prompt again>{text}"
            done = "length" if count == limit else None
            tokens = [FIRST + place for place in places] if shows else None
            if chat:
                choice: dict[str, Any] = {
                    "index": 0,
                    "delta": {"content": text},
                    "logprobs": None,
                    "finish_reason": done,
                }
                if done:
                    choice["stop_reason"] = None
                if self.parses:
                    choice["delta"] = {} if count % 2 else {"reasoning": text}
                    if count % 2 and not shows and not done:
                        continue
                choice["token_ids"] = tokens
            else:
                first = ids["prompt_token_ids"] if len(out) == 0 else None
                choice = {
                    "index": 0, "text": text, "logprobs": None, "finish_reason": done, "stop_reason": None,
                    "prompt_token_ids": first, "token_ids": tokens,
                }  # fmt: skip
            out.append(_sse({**base, "choices": [choice], **({"usage": usage(count)} if continuous else {})}))
        if broken is not None and broken.how == "abort":
            choice = {"index": 0, **({"delta": {"content": ""}} if chat else {"text": ""}), "logprobs": None}
            choice |= {"finish_reason": "abort", "stop_reason": None, "token_ids": [] if shows else None}
            out += [_sse({**base, "choices": [choice]}), b"data: [DONE]\n\n"]
        elif broken is not None and broken.how == "error":
            error = {
                "message": "EngineCore encountered an issue.",
                "type": "InternalServerError",
                "param": None,
                "code": 500,
            }
            out += [_sse({"error": error}), b"data: [DONE]\n\n"]
        elif broken is None:
            if options.get("include_usage"):
                out.append(_sse({**base, "choices": [], "usage": usage(count)}))
            out.append(b"data: [DONE]\n\n")
        return out


def _sse(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
