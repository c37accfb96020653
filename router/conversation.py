"""A chat request's messages in the form in which vLLM hands them to the chat template. Pure.

Only forms are read that are known to come out exactly as in vLLM; everything else is `PromptUnknown`: an image, an
unusual field, a value that vLLM refuses or changes. A template in the request is never read, see `chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from vllm_pd.router.chat_template import Message
from vllm_pd.router.request_fields import RequestFields


class Unknown(StrEnum):
    """Why the blocks of a prompt are not known. `KNOWN` when they are."""

    KNOWN = ""
    NO_PROMPT = "no_prompt"
    UNREADABLE = "unreadable"
    BATCH = "batch"
    EMBEDS = "embeds"
    MEDIA = "media"
    MESSAGE = "message_form"
    TOOLS = "tools_form"
    OWN_TEMPLATE = "own_template"
    TEMPLATE_KWARGS = "template_kwargs"
    REFUSED = "template_refused"
    NO_TEMPLATE = "no_template"
    NO_TOKENIZER = "no_tokenizer"
    TOKENIZER = "tokenizer"
    TRUNCATION = "truncation"
    SUFFIX = "suffix"
    REUSED_IDS = "reused_token_ids"
    CACHE_SALT = "cache_salt"
    HASH_ALGORITHM = "hash_algorithm"


class PromptUnknown(Exception):
    """The prompt cannot be told exactly."""

    def __init__(self, reason: Unknown) -> None:
        super().__init__(reason.value)
        self.reason = reason


class ContentFormat(StrEnum):
    """What a template finds as the content of a message."""

    STRING = "string"
    PARTS = "openai"


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is rendered with. The messages are still as the client wrote them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, str]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: Mapping[str, Any]


RESERVED_KWARGS = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "self",
    }
)
"""Names that mean something to the function that renders; as template kwargs they change more than a variable."""

_IGNORED_WHEN_EMPTY = frozenset({"refusal", "annotations", "audio", "function_call"})
"""What clients send back of an answer. vLLM drops these as long as there is nothing in them."""

_KEYS = {
    "system": frozenset({"role", "content", "name"}),
    "developer": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "tool_calls", "reasoning", "reasoning_content"}),
    "tool": frozenset({"role", "content", "tool_call_id"}),
}
_PLAIN_ROLES = ("user", "assistant")
_TEXT_PART = {"type", "text"}
_MEDIA_MARKS = ("image", "audio", "video", "embeds", "uuid")
_BILLING_LINE = "x-anthropic-billing-header"
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})

_objects = msgspec.json.Decoder(list[dict[str, Any]])
_optional_objects = msgspec.json.Decoder(list[dict[str, Any]] | None)
_optional_documents = msgspec.json.Decoder(list[dict[str, str]] | None)


def read_conversation(
    fields: RequestFields, defaults: Mapping[str, Any], *, drops_unused_tools: bool = False
) -> Conversation:
    """What the request asks to be rendered.

    Args:
        defaults: the worker's default template kwargs.
        drops_unused_tools: the worker leaves tools out when `tool_choice` is "none".

    Raises:
        PromptUnknown: it cannot be told, or the worker will refuse it.
    """
    if fields.chat_template is not None:
        raise PromptUnknown(Unknown.OWN_TEMPLATE)
    if isinstance(fields.messages, UnsetType):
        raise PromptUnknown(Unknown.NO_PROMPT)
    messages = _decoded(_objects, fields.messages)
    if not messages:
        raise PromptUnknown(Unknown.NO_PROMPT)
    unused = drops_unused_tools and fields.tool_choice == "none"
    return Conversation(
        messages=messages,
        tools=None if fields.tools is UNSET or unused else _tools(fields.tools),
        documents=None if fields.documents is UNSET else _decoded(_optional_documents, fields.documents),
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=fields.continue_final_message is True,
        kwargs=_kwargs(fields, defaults),
    )


def template_messages(messages: list[dict[str, Any]], form: ContentFormat, *, developer: bool) -> list[Message]:
    """The messages as the template finds them.

    Args:
        developer: the template knows the role "developer"; otherwise it becomes "system".

    Raises:
        PromptUnknown: a message has a form that vLLM may read in another way.
    """
    out = [_message(message, form) for message in messages]
    if not developer and any(message["role"] == "developer" for message in out):
        return _developer_as_system(out)
    return out


def _message(message: dict[str, Any], form: ContentFormat) -> Message:
    role = message.get("role")
    content = message.get("content")
    if form is ContentFormat.STRING and len(message) == 2 and isinstance(content, str) and role in _PLAIN_ROLES:
        return {"role": role, "content": content}
    known = _KEYS.get(role) if isinstance(role, str) else None
    if known is None or role is None:
        raise PromptUnknown(Unknown.MESSAGE)
    ignored = message.keys() - known
    if ignored and not (ignored <= _IGNORED_WHEN_EMPTY and not any(message[key] for key in ignored)):
        raise PromptUnknown(Unknown.MESSAGE)
    out: Message = {"role": role, "content": _content(content, role, form)}
    if role == "assistant":
        _add_answer(out, message, plain=not ignored)
    elif role == "tool":
        if "tool_call_id" in message:
            if not isinstance(message["tool_call_id"], str):
                raise PromptUnknown(Unknown.MESSAGE)
            out["tool_call_id"] = message["tool_call_id"]
        if isinstance(out["content"], list):
            out["content"] = "\n".join(part["text"] for part in out["content"])
    name = message.get("name", UNSET)
    if name is not UNSET:
        if not isinstance(name, str):
            raise PromptUnknown(Unknown.MESSAGE)
        out["name"] = name
    if role == "developer":
        out["tools"] = None
    return out


def _content(content: Any, role: str, form: ContentFormat) -> str | list[dict[str, str]]:
    if content is None:
        if role != "assistant":
            raise PromptUnknown(Unknown.MESSAGE)
        texts = []
    elif isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        texts = [_part_text(part) for part in content]
    else:
        raise PromptUnknown(Unknown.MESSAGE)
    if role == "system":
        texts = [text for text in map(_without_billing_line, texts) if text is not None]
    if form is ContentFormat.STRING:
        return texts[0] if len(texts) == 1 else "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part_text(part: Any) -> str:
    if not isinstance(part, dict) or part.keys() != _TEXT_PART or part["type"] != "text":
        marks = part.keys() | {part.get("type")} if isinstance(part, dict) else ()
        media = any(mark in str(key) for key in marks for mark in _MEDIA_MARKS)
        raise PromptUnknown(Unknown.MEDIA if media else Unknown.MESSAGE)
    text = part["text"]
    if not isinstance(text, str):
        raise PromptUnknown(Unknown.MESSAGE)
    return text


def _without_billing_line(text: str) -> str | None:
    """vLLM drops the line that a coding client puts first and changes every time; None when nothing else is there."""
    if not text.startswith(_BILLING_LINE):
        return text
    return text.partition("\n")[2] or None


def _add_answer(out: Message, message: dict[str, Any], *, plain: bool) -> None:
    """Tool calls and reasoning. `plain`: no other fields are there, which can change how vLLM reads these two."""
    calls = message.get("tool_calls")
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if calls is None and reasoning is None:
        return
    if not plain or not isinstance(calls, list | None) or not isinstance(reasoning, str | None):
        raise PromptUnknown(Unknown.MESSAGE)
    if calls:
        out["tool_calls"] = [_call(call) for call in calls]
    if reasoning is not None:
        out["reasoning"] = out["reasoning_content"] = reasoning


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or call.keys() != {"id", "type", "function"}
        or function.keys() != {"name", "arguments"}
        or call["type"] != "function"
        or not (isinstance(call["id"], str) and isinstance(function["name"], str))
        or not isinstance(function["arguments"], str)
    ):
        raise PromptUnknown(Unknown.MESSAGE)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError:
        arguments = {}
    except RecursionError:
        raise PromptUnknown(Unknown.MESSAGE) from None
    return {
        "id": call["id"],
        "function": {"arguments": arguments if isinstance(arguments, dict) else {}, "name": function["name"]},
        "type": "function",
    }


def _developer_as_system(messages: list[Message]) -> list[Message]:
    """vLLM's way with templates that do not know the role: "system" instead, and one system message in front."""
    turned: list[Message] = []
    for message in messages:
        if message["role"] == "developer":
            message = {**message, "role": "system"}
            del message["tools"]
        turned.append(message)
    system = [index for index, message in enumerate(turned) if message["role"] == "system"]
    if system == [0]:
        return turned
    texts = []
    for index in system:
        content = turned[index]["content"]
        texts.append(content if isinstance(content, str) else "\n".join(part["text"] for part in content))
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in turned if message["role"] != "system")]


def _tools(raw: Raw) -> list[dict[str, Any]] | None:
    """Tools as the worker's data model writes them out: known fields, in its order."""
    tools = _decoded(_optional_objects, raw)
    return None if tools is None else [_tool(tool) for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not tool.keys() <= {"type", "function"} or tool.get("type", "function") != "function":
        raise PromptUnknown(Unknown.TOOLS)
    if not isinstance(function, dict) or not function.keys() <= {"name", "description", "parameters", "strict"}:
        raise PromptUnknown(Unknown.TOOLS)
    name, description, parameters = function.get("name"), function.get("description"), function.get("parameters")
    strict = function.get("strict")
    if not (isinstance(name, str) and isinstance(description, str | None) and isinstance(parameters, dict | None)):
        raise PromptUnknown(Unknown.TOOLS)
    out: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if strict is not None:
        if not isinstance(strict, bool):
            raise PromptUnknown(Unknown.TOOLS)
        out["strict"] = strict
    return {"type": "function", "function": out}


def _kwargs(fields: RequestFields, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    own = fields.chat_template_kwargs
    if own is None:
        own = {}
    elif not isinstance(own, dict) or own.keys() & RESERVED_KWARGS:
        raise PromptUnknown(Unknown.TEMPLATE_KWARGS)
    effort = fields.reasoning_effort
    if effort is not None:
        if not isinstance(effort, str) or effort not in _EFFORTS:
            raise PromptUnknown(Unknown.TEMPLATE_KWARGS)
        thinking = {} if "enable_thinking" in own else {"enable_thinking": effort != "none"}
        own = {**own, **thinking, "reasoning_effort": effort}
    if not own:
        return defaults
    return {**defaults, **{key: value for key, value in own.items() if value not in (None, "auto")}}


def _decoded(decoder: msgspec.json.Decoder[Any], raw: Raw) -> Any:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise PromptUnknown(Unknown.UNREADABLE) from None
