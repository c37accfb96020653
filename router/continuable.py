"""Which streams another worker can continue exactly from their token ids. Pure.

The continuation is a completion whose prompt is the client's prompt and the answer so far. That is exact for whatever
looks at single steps (temperature, top_k, logit_bias ...) or at prompt and answer alike (repetition_penalty), and not
for what looks at the answer alone (the other penalties, stop strings, grammars, logprobs) or keeps a state (seeds).
A field that is not known here is taken for one of the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from vllm_pd.router.decision import PromptKind

UNREADABLE = "unreadable_body"
UNKNOWN_FIELD = "unknown_field"
MEDIA = "media"
PROMPT_FORM = "prompt_form"

DEFAULT_MAX_TOKENS = 16
"""What vLLM gives a completion that names no limit. A chat gets what fits."""

_CARRIED = frozenset(
    {
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream_options",
        "stream_interval",
        "cache_salt",
        "session_id",
        "priority",
        "user",
    }
)
"""Fields that the continuation has as the client wrote them."""
_COUNTED = frozenset({"max_tokens", "max_completion_tokens", "min_tokens"})
_SPENT = frozenset(
    {
        # They made the prompt, which is ids now, or its form in the first event, or what the answer is called.
        "messages",
        "prompt",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "documents",
        "return_prompt_text",
        "return_token_offsets",
        "return_token_ids",
        "request_id",
        "stream",
        # They mean something only beside fields that are refused.
        "return_tokens_as_token_ids",
        "parallel_tool_calls",
        "length_penalty",
        "mm_payload",
        "return_mm_kwargs",
    }
)


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_NEUTRAL: Mapping[str, Callable[[Any], bool]] = {
    "n": lambda value: value == 1,
    "best_of": lambda value: value == 1,
    "seed": lambda value: False,
    "stop": lambda value: value in ("", []),
    "presence_penalty": lambda value: value == 0,
    "frequency_penalty": lambda value: value == 0,
    "logprobs": lambda value: value is False,
    "top_logprobs": lambda value: value == 0,
    "prompt_logprobs": lambda value: False,
    "logprob_token_ids": lambda value: value == [],
    "echo": lambda value: value is False,
    "suffix": lambda value: False,
    "use_beam_search": lambda value: value is False,
    "bad_words": lambda value: value == [],
    "response_format": _is_text_format,
    "structured_outputs": lambda value: False,
    "tools": lambda value: value == [],
    "tool_choice": lambda value: value == "none",
    "include_reasoning": lambda value: value is True,
    "thinking_token_budget": lambda value: value == -1,
    "watermarking": lambda value: value is False,
    "vllm_xargs": lambda value: value == {},
    "repetition_detection": lambda value: False,
    "prompt_embeds": lambda value: False,
    "mm_processor_kwargs": lambda value: value == {},
    "media_io_kwargs": lambda value: value == {},
    "kv_transfer_params": lambda value: False,
    "ec_transfer_params": lambda value: False,
    "routed_experts_prompt_start": lambda value: value == 0,
}
"""Fields that make a stream inexact to continue unless they are null or say what holds without them."""
_ANY = _CARRIED | _COUNTED | _SPENT


class _Part(msgspec.Struct):
    type: Any = None
    uuid: Any = None


class _Message(msgspec.Struct):
    content: Raw | UnsetType = UNSET


_object = msgspec.json.Decoder(dict[str, Raw])
_messages = msgspec.json.Decoder(list[_Message])
_parts = msgspec.json.Decoder(list[_Part])
_NULL = Raw(b"null")
_BEGINNING = 64


def read_body(body: bytes) -> dict[str, Raw] | None:
    """The members of the body, None if it is no JSON object."""
    try:
        return _object.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def why_not(body: Mapping[str, Raw] | None, kind: PromptKind) -> str:
    """What in a request forbids to continue its stream: the field's name, or a reason from above; "" if nothing does.

    Args:
        body: the request's members, None where they cannot be read.
    """
    if body is None:
        return UNREADABLE
    for name, raw in body.items():
        if name in _ANY or raw == _NULL:
            continue
        neutral = _NEUTRAL.get(name)
        if neutral is None:
            return UNKNOWN_FIELD
        try:
            is_neutral = neutral(msgspec.json.decode(raw))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # `read_body` does not look into values.
            return UNREADABLE
        if not is_neutral:
            return name
    if kind is PromptKind.CHAT:
        return _why_not_messages(body.get("messages"))
    # Only its beginning tells, and it may be long.
    prompt = bytes(memoryview(body.get("prompt", b""))[:_BEGINNING])
    is_one = prompt.startswith(b'"') or (prompt.startswith(b"[") and prompt[1:].lstrip()[:1].isdigit())
    return "" if is_one else PROMPT_FORM


def _why_not_messages(raw: Raw | None) -> str:
    """Media stand in the prompt as ids of their own, from which nobody can tell what they were. A part without a type,
    or with an id, is one if another of its fields says so."""
    if raw is None:
        return PROMPT_FORM
    if bytes(raw).count(b"[") == 1:
        # The list of messages itself: all contents are texts.
        return ""
    try:
        for message in _messages.decode(raw):
            content = message.content
            if (
                not isinstance(content, UnsetType)
                and bytes(memoryview(content)[:1]) == b"["
                and any(part.type != "text" or part.uuid is not None for part in _parts.decode(content))
            ):
                return MEDIA
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return PROMPT_FORM
    return ""


def wants_ids(body: Mapping[str, Raw]) -> bool:
    """Whether the client itself has asked for token ids."""
    return bytes(body.get("return_token_ids", b"")) == b"true"


def asking_ids(body: bytes) -> bytes:
    """The same asking for token ids, by its last member, which wins. `body` must be a non-empty JSON object."""
    end = body.rindex(b"}")
    return b"".join((body[:end], b',"return_token_ids":true', body[end:]))


def wants_usage(body: Mapping[str, Raw]) -> bool:
    """Whether the stream is to end with token counts."""
    try:
        options = msgspec.json.decode(body.get("stream_options", _NULL))
    except msgspec.DecodeError:
        return False
    return isinstance(options, dict) and options.get("include_usage") is True


def answer_limit(body: Mapping[str, Raw], kind: PromptKind) -> int | None:
    """How many tokens the client wants at most, None if as many as fit."""
    names = ("max_completion_tokens", "max_tokens") if kind is PromptKind.CHAT else ("max_tokens",)
    for name in names:
        value = _integer(body.get(name))
        if value is not None:
            return value
    return None if kind is PromptKind.CHAT else DEFAULT_MAX_TOKENS


def continuation_body(body: Mapping[str, Raw], prompt: bytes, answer: Sequence[int], left: int) -> bytes:
    """The completion that goes on with a stream.

    Args:
        body: of the client's request, for which `why_not` found nothing.
        prompt: ids of its prompt as JSON without brackets.
        answer: ids of the answer so far.
        left: tokens that may still come, at least 1.
    """
    fields: dict[str, Any] = {name: raw for name, raw in body.items() if name in _CARRIED}
    ids = b",".join([prompt, *([b",".join(b"%d" % token for token in answer)] if answer else [])])
    fields["prompt"] = Raw(b"[" + ids + b"]")
    fields["max_tokens"] = left
    least = _integer(body.get("min_tokens")) or 0
    if least > len(answer):
        fields["min_tokens"] = least - len(answer)
    fields["stream"] = True
    return msgspec.json.encode(fields)


def _integer(raw: Raw | None) -> int | None:
    try:
        return msgspec.json.decode(raw, type=int | None) if raw is not None else None
    except msgspec.DecodeError:
        return None
