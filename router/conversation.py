"""A chat request's messages in the form in which vLLM hands them to the chat template. Pure.

Only forms are read that are known to come out exactly as in vLLM; everything else is `PromptUnknown`: an image, an
unusual field, a value that vLLM refuses or changes. A template in the request is never read, see `chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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


class Conversation(msgspec.Struct, frozen=True):
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

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_PLAIN_ROLES = frozenset({"system", "user", "assistant"})
_TEXT_PARTS = (frozenset({"type", "text"}), frozenset({"type", "text", "cache_control"}))
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
    out: list[Message] = []
    plain, developers = form is ContentFormat.STRING, False
    for message in messages:
        role, content = message.get("role"), message.get("content")
        # Nearly all messages are like this, and there are many in a long conversation.
        if (
            plain
            and type(content) is str
            and type(role) is str
            and role in _PLAIN_ROLES
            and len(message) == 2
            and (role != "system" or not content.startswith(_BILLING_LINE))
        ):
            out.append({"role": role, "content": content})
            continue
        out.append(_message(message, form))
        developers = developers or role == "developer"
    return _developer_as_system(out) if developers and not developer else out


def _message(message: dict[str, Any], form: ContentFormat) -> Message:
    role = message.get("role")
    content = message.get("content")
    if not isinstance(role, str) or role not in _ROLES or "task" in message:
        raise PromptUnknown(Unknown.MESSAGE)
    # Of all other fields, vLLM passes on these alone, whatever else a client sends back of an answer.
    out: Message = {"role": role, "content": _content(content, role, form)}
    if role == "assistant":
        _add_answer(out, message)
    elif role == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = _string(message["tool_call_id"])
    if "name" in message:
        out["name"] = _string(message["name"])
    if role == "developer":
        if message.get("tools") is not None:
            raise PromptUnknown(Unknown.MESSAGE)
        out["tools"] = None
    return out


def _content(content: Any, role: str, form: ContentFormat) -> str | list[dict[str, Any]]:
    if content is None:
        parts = []
    elif isinstance(content, str):
        parts = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        parts = [_part(part) for part in content]
    else:
        raise PromptUnknown(Unknown.MESSAGE)
    if role == "system":
        parts = _without_billing_line(parts)
    if form is ContentFormat.STRING:
        return "\n".join(part["text"] for part in parts if part["text"])
    return "\n".join(part["text"] for part in parts) if role == "tool" else parts


def _part(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict) or part.keys() not in _TEXT_PARTS or part["type"] != "text":
        names = (*part, part.get("type")) if isinstance(part, dict) else ()
        media = any(mark in str(name) for name in names for mark in _MEDIA_MARKS)
        raise PromptUnknown(Unknown.MEDIA if media else Unknown.MESSAGE)
    return {"type": "text", "text": _string(part["text"]), **part}


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise PromptUnknown(Unknown.MESSAGE)
    return value


def _without_billing_line(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """vLLM drops a line that a coding client puts in front and changes every time, so that the rest can be cached."""
    kept = []
    for part in parts:
        if part["text"].startswith(_BILLING_LINE):
            part = {**part, "text": part["text"].partition("\n")[2]}
            if not part["text"]:
                continue
        kept.append(part)
    return kept


def _add_answer(out: Message, message: dict[str, Any]) -> None:
    """Tool calls and reasoning."""
    calls = message.get("tool_calls")
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if not isinstance(calls, list | None):
        raise PromptUnknown(Unknown.MESSAGE)
    if calls:
        out["tool_calls"] = [_call(call) for call in calls]
    if reasoning is not None:
        out["reasoning"] = out["reasoning_content"] = _string(reasoning)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or call.keys() != {"id", "type", "function"}
        or function.keys() != {"name", "arguments"}
        or call["type"] != "function"
    ):
        raise PromptUnknown(Unknown.MESSAGE)
    try:
        arguments = json.loads(_string(function["arguments"]) or "{}")
    except json.JSONDecodeError:
        arguments = {}
    except RecursionError:
        raise PromptUnknown(Unknown.MESSAGE) from None
    return {
        "id": _string(call["id"]),
        "function": {
            "arguments": arguments if isinstance(arguments, dict) else {},
            "name": _string(function["name"]),
        },
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
