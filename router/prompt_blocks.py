"""From a request to the blocks of its prompt: rendered, tokenized and hashed exactly as its worker will do it.

What is not known to come out exactly alike is unknown, with a reason: such a prompt claims no overlap anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from vllm_pd.block_hash import BlockHasher, BlockKey, ExtraKeys, Lora, extra_keys
from vllm_pd.router.conversation import PromptUnknown, Unknown
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.hash_chain import MAX_BYTES, HashChain, Start, Walk
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.router.request_fields import RequestFields
from vllm_pd.state.base import PoolSpec

SHORT_BYTES = 4096
"""A text of this size is tokenized in about a millisecond by `tokenizers`, and"""
FAST_CHARS = 16_384
"""one of this length by fastokens."""
CHEAP_IDS = 16_384
"""So many tokens are hashed in about a millisecond."""
LONG_BYTES = 200_000
"""JSON of this size is too much to render at once, whatever is known of it."""

_BYTES_PER_TOKEN = 4

_text = msgspec.json.Decoder(str)
_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]])


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt's length and the keys of its whole blocks.

    Attributes:
        tokens: prompt length; an estimate when unknown.
        keys: of the whole blocks, in order; empty when unknown.
        why_unknown: why the prompt could not be told exactly (a value of `Unknown`); "" when it could.
    """

    tokens: int
    keys: Sequence[BlockKey]
    why_unknown: str = ""


class _Prompt(NamedTuple):
    """A prompt as it was read: token ids, or a text."""

    ids: list[int] | None
    text: str
    add_special_tokens: bool = False


class _Prepared(NamedTuple):
    """What `cheap` found out."""

    fields: RequestFields
    lora: Lora | None
    prompt: _Prompt
    extra: ExtraKeys | None
    walk: Walk | None
    pieces: list[str]
    """Of the text, those that are not known."""


class PromptHasher:
    """Hashes the prompts of one pool. May be called from several threads.

    Args:
        spec: the pool's.
        tokenizer: of its workers; None until it is known, then only prompts of token ids are hashed.
        max_bytes: of what is kept of earlier prompts.
    """

    def __init__(self, spec: PoolSpec, tokenizer: PromptTokenizer | None, *, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._prepared: _Prepared | None = None
        try:
            self._hasher: BlockHasher | None = BlockHasher(spec.block_size, spec.hash_algo, spec.hash_seed)
        except ValueError:
            self._hasher = None
        else:
            self._chain = HashChain(self._hasher, max_bytes)

    def blocks(self, fields: RequestFields, kind: PromptKind, *, lora: Lora | None = None) -> PromptBlocks:
        """The blocks of a request's prompt. Never raises."""
        prepared = self._prepared
        try:
            if self._hasher is None:
                raise PromptUnknown(Unknown.HASH_ALGORITHM)
            if prepared is None or prepared.fields is not fields or prepared.lora != lora:
                prepared = self._prepare(fields, kind, lora)
            prompt = prepared.prompt
            if prompt.ids is not None or self._tokenizer is None or prepared.walk is None:
                ids = prompt.ids or []
                try:
                    return PromptBlocks(len(ids), self._hasher.keys(ids, prepared.extra))
                except ValueError:
                    raise PromptUnknown(Unknown.UNREADABLE) from None
            _, after = self._tokenizer.around(add_special_tokens=prompt.add_special_tokens)
            tokens, keys = self._chain.keys(prepared.walk, prepared.pieces, self._tokenizer.segments.ids, after)
            return PromptBlocks(tokens, keys)
        except PromptUnknown as e:
            return PromptBlocks(estimated_tokens(fields), (), e.reason.value)

    def cheap(self, fields: RequestFields, kind: PromptKind, *, lora: Lora | None = None) -> bool:
        """Whether `blocks` takes less than about a millisecond; otherwise call it in a thread.

        What is found out here is kept for the call of `blocks` with the same arguments that follows.
        """
        size = (
            _size(fields.messages, fields.tools, fields.documents) if kind is PromptKind.CHAT else _size(fields.prompt)
        )
        if size <= SHORT_BYTES or size > LONG_BYTES or self._tokenizer is None or self._hasher is None:
            return size <= LONG_BYTES
        try:
            prepared = self._prepared = self._prepare(fields, kind, lora)
        except PromptUnknown:
            return True
        if prepared.prompt.ids is not None or prepared.walk is None:
            return len(prepared.prompt.ids or ()) <= CHEAP_IDS
        most = FAST_CHARS if self._tokenizer.encoder.fast else SHORT_BYTES
        if len(prepared.prompt.text) - prepared.walk.end <= most:
            return True
        segments = self._tokenizer.segments
        return sum(len(piece) for piece in prepared.pieces if not segments.knows(piece)) <= most

    @property
    def kept_bytes(self) -> int:
        """What is kept of earlier prompts, about."""
        return self._chain.kept_bytes if self._hasher is not None else 0

    def _prepare(self, fields: RequestFields, kind: PromptKind, lora: Lora | None) -> _Prepared:
        """Everything but tokenizing and hashing what is new."""
        extra = _extra(fields, lora)
        prompt = self._read(fields, kind)
        if prompt.ids is not None or self._tokenizer is None:
            return _Prepared(fields, lora, prompt, extra, None, [])
        before, _ = self._tokenizer.around(add_special_tokens=prompt.add_special_tokens)
        segments, start = self._tokenizer.segments, Start(extra, before, self._tokenizer.encoder.generation)
        walk = self._chain.walk(start, prompt.text, segments.separator)
        return _Prepared(fields, lora, prompt, extra, walk, segments.cut(prompt.text, walk.end))

    def _read(self, fields: RequestFields, kind: PromptKind) -> _Prompt:
        _refuse_what_changes_the_prompt(fields, kind)
        if kind is PromptKind.CHAT:
            if self._tokenizer is None:
                raise PromptUnknown(Unknown.NO_TOKENIZER)
            return _Prompt(None, self._tokenizer.render(fields), fields.add_special_tokens is True)
        if isinstance(fields.prompt, UnsetType):
            raise PromptUnknown(Unknown.NO_PROMPT)
        first = bytes(memoryview(fields.prompt)[:1])
        try:
            if first == b"[":
                return _Prompt(_ids.decode(fields.prompt), "")
            text, special = _text.decode(fields.prompt), fields.add_special_tokens is not False
        except msgspec.DecodeError:
            raise PromptUnknown(Unknown.BATCH if first == b"[" else Unknown.UNREADABLE) from None
        if self._tokenizer is None:
            raise PromptUnknown(Unknown.NO_TOKENIZER)
        return _Prompt(None, text, special)


def estimated_tokens(fields: RequestFields) -> int:
    """A guess at a prompt's length, from its size."""
    return _size(fields.prompt, fields.messages, fields.tools) // _BYTES_PER_TOKEN


def _size(*parts: Raw | UnsetType) -> int:
    """Bytes of JSON."""
    return sum(memoryview(part).nbytes for part in parts if not isinstance(part, UnsetType))


def _refuse_what_changes_the_prompt(fields: RequestFields, kind: PromptKind) -> None:
    if fields.truncate_prompt_tokens is not None:
        raise PromptUnknown(Unknown.TRUNCATION)
    transfer = fields.kv_transfer_params
    if transfer is not UNSET and b"prompt_token_ids" in bytes(transfer):
        raise PromptUnknown(Unknown.REUSED_IDS)
    if kind is PromptKind.COMPLETION:
        if fields.prompt_embeds is not None:
            raise PromptUnknown(Unknown.EMBEDS)
        if fields.suffix is not None:
            raise PromptUnknown(Unknown.SUFFIX)


def _extra(fields: RequestFields, lora: Lora | None) -> ExtraKeys | None:
    if lora is None and fields.cache_salt is None:
        return None
    if fields.cache_salt == "":
        raise PromptUnknown(Unknown.CACHE_SALT)
    try:
        return extra_keys(lora, fields.cache_salt)
    except ValueError:
        raise PromptUnknown(Unknown.CACHE_SALT) from None
