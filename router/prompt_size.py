"""How many tokens a prompt has, as far as it matters: is it under one block?

Counting a long prompt costs milliseconds and changes nothing, so only prompts that could be under one block are
counted. Unknown is an answer: such a prompt is treated as long, and a hand-over of less than one block is correct.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, UnsetType

from vllm_pd.router.conversation import PromptUnknown
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.router.request_fields import RequestFields

MAX_BYTES_PER_TOKEN = 32
"""A text with more bytes per token of the block size than this is taken as long without counting."""

_ADDED_TOKENS = 2
"""What a tokenizer adds to a text at most: a start token, and a space in front."""

_text = msgspec.json.Decoder(str)


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
    if tokenizer is None or _size(fields.messages) > _longest_json(block_size):
        return None
    largest = MAX_BYTES_PER_TOKEN * block_size
    if _size(fields.tools) > largest or _size(fields.documents) > largest:
        return None
    try:
        text = tokenizer.render(fields)
    except PromptUnknown:
        return None
    if len(text) > largest:
        return None
    return tokenizer.count(text, add_special_tokens=fields.add_special_tokens is True)


def _longest_json(block_size: int) -> int:
    """Bytes of JSON above which a prompt counts as long. Escapes take up to six bytes for one."""
    return 6 * MAX_BYTES_PER_TOKEN * block_size


def _size(raw: Raw | UnsetType) -> int:
    return 0 if isinstance(raw, UnsetType) else memoryview(raw).nbytes
