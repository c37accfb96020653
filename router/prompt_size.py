"""How many tokens a prompt has, as far as it matters: is it under one block?

Counting a long prompt costs milliseconds and changes nothing, so only prompts that could be under one block are
counted. Unknown is an answer: such a prompt is treated as long, and a hand-over of less than one block is correct.
"""

from __future__ import annotations

from typing import Any

import msgspec
import tokenizers
from msgspec import UNSET, Raw, UnsetType

from vllm_pd.router.chat_template import ChatTemplate, TemplateFailed, special_tokens
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.request_fields import RequestFields
from vllm_pd.state.base import TokenizerFiles

MAX_BYTES_PER_TOKEN = 32
"""A text with more bytes per token of the block size than this is taken as long without counting."""

_ADDED_TOKENS = 2
"""What a tokenizer adds to a text at most: a start token, and a space in front."""

_PLAIN_MESSAGE_KEYS = frozenset({"role", "content", "name"})
_text = msgspec.json.Decoder(str)


class PromptTokenizer:
    """A model's tokenizer and chat template. Building one takes up to a second: do it off the event loop.

    Raises:
        ValueError: the tokenizer file is unusable.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
        except Exception as e:  # the Rust library raises bare Exception
            raise ValueError(f"tokenizer.json cannot be loaded: {e}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.template: ChatTemplate | None = None
        if files.chat_template:
            try:
                self.template = ChatTemplate(files.chat_template, special_tokens(files.tokenizer_config))
            except TemplateFailed:
                # The worker serves it all the same; here chat prompts then count as of unknown length.
                self.template = None

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        """Number of tokens of `text`. About 0.25 ms per KB."""
        # Of the library's calls only those for batches let other threads run.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return len(encoded.ids)


def prompt_tokens(
    fields: RequestFields, kind: PromptKind, block_size: int, tokenizer: PromptTokenizer | None
) -> int | None:
    """The number of tokens (for a text proven short without a tokenizer: an upper bound), or None when unknown.

    Exact for token ids. Pure but for `strftime_now` in a template.
    """
    if kind is PromptKind.CHAT:
        return _chat_tokens(fields, block_size, tokenizer)
    if isinstance(fields.prompt, UnsetType):
        return None
    if bytes(memoryview(fields.prompt)[:1]) == b"[":
        return bytes(fields.prompt).count(b",") + 1
    return _text_tokens(fields.prompt, fields, block_size, tokenizer)


def worth_a_thread(fields: RequestFields, kind: PromptKind, block_size: int) -> bool:
    """Whether counting could hold the event loop for more than about a millisecond.

    What is too long to be counted at all is told from its length, at once.
    """
    raw = fields.messages if kind is PromptKind.CHAT else fields.prompt
    return 4096 < _size(raw) <= _longest_json(block_size)


def _text_tokens(raw: Raw, fields: RequestFields, block_size: int, tokenizer: PromptTokenizer | None) -> int | None:
    if _size(raw) > _longest_json(block_size):
        return None
    try:
        text = _text.decode(raw)
    except msgspec.DecodeError:
        return None
    size = len(text.encode())
    if tokenizer is not None and size <= MAX_BYTES_PER_TOKEN * block_size:
        return tokenizer.count(text, add_special_tokens=fields.add_special_tokens is not False)
    return size + _ADDED_TOKENS if size + _ADDED_TOKENS < block_size else None


def _chat_tokens(fields: RequestFields, block_size: int, tokenizer: PromptTokenizer | None) -> int | None:
    if tokenizer is None or tokenizer.template is None or isinstance(fields.messages, UnsetType):
        return None
    if fields.chat_template is not None or fields.continue_final_message:
        return None
    largest = MAX_BYTES_PER_TOKEN * block_size
    if _size(fields.messages) > _longest_json(block_size):
        return None
    if _size(fields.tools) > largest or _size(fields.documents) > largest:
        return None
    try:
        messages = msgspec.json.decode(fields.messages, type=list[dict[str, Any]])
        tools = msgspec.json.decode(fields.tools, type=list[Any] | None) if fields.tools is not UNSET else None
        documents = (
            msgspec.json.decode(fields.documents, type=list[Any] | None) if fields.documents is not UNSET else None
        )
    except (msgspec.DecodeError, RecursionError):
        return None
    if not all(_is_plain(message) for message in messages):
        return None
    try:
        text = tokenizer.template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=fields.add_generation_prompt is not False,
            extra=_template_kwargs(fields),
        )
    except TemplateFailed:
        return None
    if len(text) > largest:
        return None
    return tokenizer.count(text, add_special_tokens=fields.add_special_tokens is True)


def _longest_json(block_size: int) -> int:
    """Bytes of JSON above which a prompt counts as long. Escapes take up to six bytes for one."""
    return 6 * MAX_BYTES_PER_TOKEN * block_size


def _size(raw: Raw | UnsetType) -> int:
    return 0 if isinstance(raw, UnsetType) else memoryview(raw).nbytes


def _is_plain(message: dict[str, Any]) -> bool:
    """Only text that the worker hands to the template unchanged: no parts, no media, no tool calls."""
    return message.keys() <= _PLAIN_MESSAGE_KEYS and isinstance(message.get("content"), str)


def _template_kwargs(fields: RequestFields) -> dict[str, Any]:
    extra = dict(fields.chat_template_kwargs) if isinstance(fields.chat_template_kwargs, dict) else {}
    if fields.reasoning_effort is not None:
        extra.setdefault("enable_thinking", fields.reasoning_effort != "none")
        extra["reasoning_effort"] = fields.reasoning_effort
    return extra
