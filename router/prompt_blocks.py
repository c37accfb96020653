"""From a request to the blocks of its prompt: rendered, tokenized and hashed exactly as its worker will do it.

What is not known to come out exactly alike is unknown, with a reason: such a prompt claims no overlap anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from vllm_pd.block_hash import BlockHasher, BlockKey, ExtraKeys, Lora, extra_keys
from vllm_pd.router.conversation import PromptUnknown, Unknown
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.router.request_fields import RequestFields
from vllm_pd.state.base import PoolSpec

CHEAP_BYTES = 4096
"""A prompt of this many bytes of JSON is tokenized in about a millisecond."""

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


class PromptHasher:
    """Hashes the prompts of one pool. May be called from several threads.

    Args:
        spec: the pool's.
        tokenizer: of its workers; None until it is known, then only prompts of token ids are hashed.
    """

    def __init__(self, spec: PoolSpec, tokenizer: PromptTokenizer | None) -> None:
        self._tokenizer = tokenizer
        try:
            self._hasher: BlockHasher | None = BlockHasher(spec.block_size, spec.hash_algo, spec.hash_seed)
        except ValueError:
            self._hasher = None

    def blocks(self, fields: RequestFields, kind: PromptKind, *, lora: Lora | None = None) -> PromptBlocks:
        """The blocks of a request's prompt. Never raises."""
        try:
            if self._hasher is None:
                raise PromptUnknown(Unknown.HASH_ALGORITHM)
            extra = _extra(fields, lora)
            ids = self._token_ids(fields, kind)
            return PromptBlocks(len(ids), self._hasher.keys(ids, extra))
        except PromptUnknown as e:
            return PromptBlocks(estimated_tokens(fields), (), e.reason.value)

    def cheap(self, fields: RequestFields, kind: PromptKind) -> bool:
        """Whether `blocks` takes less than about a millisecond; otherwise call it in a thread."""
        raw = fields.messages if kind is PromptKind.CHAT else fields.prompt
        return isinstance(raw, UnsetType) or memoryview(raw).nbytes <= CHEAP_BYTES

    def _token_ids(self, fields: RequestFields, kind: PromptKind) -> list[int]:
        _refuse_what_changes_the_prompt(fields, kind)
        if kind is PromptKind.CHAT:
            if self._tokenizer is None:
                raise PromptUnknown(Unknown.NO_TOKENIZER)
            text, special = self._tokenizer.render(fields), fields.add_special_tokens is True
            return self._tokenizer.encode(text, add_special_tokens=special)
        if isinstance(fields.prompt, UnsetType):
            raise PromptUnknown(Unknown.NO_PROMPT)
        first = bytes(memoryview(fields.prompt)[:1])
        try:
            if first == b"[":
                return _ids.decode(fields.prompt)
            text, special = _text.decode(fields.prompt), fields.add_special_tokens is not False
        except msgspec.DecodeError:
            raise PromptUnknown(Unknown.BATCH if first == b"[" else Unknown.UNREADABLE) from None
        if self._tokenizer is None:
            raise PromptUnknown(Unknown.NO_TOKENIZER)
        return self._tokenizer.encode(text, add_special_tokens=special)


def estimated_tokens(fields: RequestFields) -> int:
    """A guess at a prompt's length, from its size."""
    size = sum(
        memoryview(raw).nbytes
        for raw in (fields.prompt, fields.messages, fields.tools)
        if not isinstance(raw, UnsetType)
    )
    return size // _BYTES_PER_TOKEN


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
