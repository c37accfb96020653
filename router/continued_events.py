"""Events of a completion, written as the events of the stream that it continues. Pure.

The form is vLLM's, field by field in its order: a client cannot tell where another worker took over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType


class Identity(msgspec.Struct):
    """What all events of a stream say alike."""

    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct, omit_defaults=True):
    prompt_tokens: int = msgspec.field(default=-1)
    total_tokens: int = msgspec.field(default=-1)
    completion_tokens: int = msgspec.field(default=-1)
    prompt_tokens_details: Raw | UnsetType = UNSET
    completion_tokens_details: Raw | UnsetType = UNSET


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    system_fingerprint: Raw | UnsetType = UNSET


_event = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class Made:
    """An event for the client, and the tokens in it: text, ids, finish reason."""

    data: bytes
    tokens: tuple[tuple[str, list[int], str | None], ...]


class ContinuedEvents:
    """Belongs to one stream and one continuation.

    Args:
        identity: of the stream's own events.
        chat: whether the stream is a chat.
        shows_ids: whether the client gets the ids.
        prompt_tokens: length of the client's prompt.
        kept: tokens of the answer that the completion has as the end of its prompt.
    """

    def __init__(self, identity: Identity, *, chat: bool, shows_ids: bool, prompt_tokens: int, kept: int) -> None:
        self._identity = identity
        self._chat = chat
        self._shows_ids = shows_ids
        self._prompt_tokens = prompt_tokens
        self._kept = kept

    def event(self, data: bytes) -> Made:
        """The event for one of the completion, given its JSON.

        Raises:
            msgspec.DecodeError: it is none.
        """
        event = _event.decode(data)
        value: dict[str, Any] = {
            **msgspec.to_builtins(self._identity),
            "choices": [self._choice(choice) for choice in event.choices],
        }
        if event.usage is not None:
            value["usage"] = self._usage(event.usage)
        if event.system_fingerprint is not UNSET:
            value["system_fingerprint"] = event.system_fingerprint
        tokens = tuple((choice.text, choice.token_ids or [], choice.finish_reason) for choice in event.choices)
        return Made(_sse(value), tokens)

    def _choice(self, choice: _Choice) -> dict[str, Any]:
        ids = choice.token_ids if self._shows_ids else None
        if not self._chat:
            return {
                "index": 0, "text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason, "prompt_token_ids": None, "token_ids": ids,
            }  # fmt: skip
        value: dict[str, Any] = {
            "index": 0, "delta": {"content": choice.text}, "logprobs": None, "finish_reason": choice.finish_reason,
        }  # fmt: skip
        if choice.finish_reason is not None:
            value["stop_reason"] = choice.stop_reason
        value["token_ids"] = ids
        return value

    def _usage(self, usage: _Usage) -> _Usage:
        """The same counts for the client's own prompt. What of it came from a cache is not known any more."""
        return _Usage(
            prompt_tokens=self._prompt_tokens,
            total_tokens=usage.total_tokens,
            completion_tokens=usage.completion_tokens + self._kept,
            completion_tokens_details=usage.completion_tokens_details,
        )

    def usage(self) -> bytes:
        """The event that tells the counts, for an answer of just the kept tokens."""
        total = self._prompt_tokens + self._kept
        value = {
            **msgspec.to_builtins(self._identity),
            "choices": [],
            "usage": _Usage(prompt_tokens=self._prompt_tokens, total_tokens=total, completion_tokens=self._kept),
        }
        return _sse(value)


def _sse(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
