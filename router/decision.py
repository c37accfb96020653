"""Whole or split: pure rules over what a request asks and what the cluster has.

A split request is prefilled on one worker and decoded on another. What cannot be split correctly, or gains nothing,
goes whole to a decode worker; each bypass has a name that metrics and debug logs carry.
"""

from __future__ import annotations

import re
from enum import StrEnum

from msgspec import UNSET, UnsetType

from vllm_pd.router.request_fields import RequestFields

_LONGEST_ID = 32
"""Bytes of JSON for a token id with white space around it; a list that takes more is not looked at."""
_FIRST_ITEM = re.compile(rb"\[\s*(.)", re.DOTALL)


class PromptKind(StrEnum):
    """Where the prompt of a splittable endpoint stands: `messages` or `prompt`."""

    CHAT = "chat"
    COMPLETION = "completion"


class Reason(StrEnum):
    """Why a request goes whole; `SPLIT` when it does not."""

    SPLIT = "split"
    ENDPOINT = "endpoint"
    UNREADABLE = "unreadable_body"
    NO_PROMPT = "no_prompt"
    OWN_TRANSFER = "own_transfer_params"
    N = "n"
    BEST_OF = "best_of"
    BEAM_SEARCH = "beam_search"
    ECHO = "echo"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ROUTED_EXPERTS = "routed_experts"
    ONE_TOKEN = "one_token"
    BATCH = "prompt_batch"
    EMBEDS = "prompt_embeds"
    TRUNCATION = "truncation"
    SHORT = "short_prompt"
    CACHED = "little_uncached"
    SOONER_WHOLE = "sooner_whole"
    PREFILL_BUSY = "prefill_busy"
    NEVER = "never"
    EQUALS = "all_do_both"
    NO_PREFILL = "no_prefill_worker"
    NO_TRANSFER = "no_transfer"


UNSERVED_IF_STRICT = frozenset({Reason.NO_PREFILL, Reason.NO_TRANSFER})
"""A router with --require-prefill refuses these: they could be split if the cluster were as it should be. What is whole
by its own nature, or because that is found to be better, is served."""


def bypass_by_request(fields: RequestFields | None, kind: PromptKind | None) -> Reason | None:
    """The first property of the request itself that forbids a split, or None. `kind` is None on other endpoints."""
    if kind is None:
        return Reason.ENDPOINT
    if fields is None:
        return Reason.UNREADABLE
    if fields.kv_transfer_params is not UNSET:
        return Reason.OWN_TRANSFER
    if fields.n is not None and fields.n != 1:
        return Reason.N
    if fields.best_of is not None and fields.best_of != 1:
        return Reason.BEST_OF
    if fields.use_beam_search:
        return Reason.BEAM_SEARCH
    if fields.echo:
        return Reason.ECHO
    if fields.prompt_logprobs is not None:
        return Reason.PROMPT_LOGPROBS
    if fields.routed_experts_prompt_start is not None:
        # The client reads which experts its prompt's tokens went through: only the worker that computes them knows.
        return Reason.ROUTED_EXPERTS
    limit = fields.max_tokens
    if kind is PromptKind.CHAT and fields.max_completion_tokens is not None:
        limit = fields.max_completion_tokens
    if limit is not None and limit <= 1:
        return Reason.ONE_TOKEN
    if fields.truncate_prompt_tokens is not None and fields.truncate_prompt_tokens < 0:
        # "As long as fits" depends on max_tokens, which differs between the legs: they would see different prompts.
        return Reason.TRUNCATION
    return _bypass_by_messages(fields) if kind is PromptKind.CHAT else _bypass_by_prompt(fields)


def _bypass_by_messages(fields: RequestFields) -> Reason | None:
    first = _FIRST_ITEM.match(memoryview(fields.messages)) if fields.messages is not UNSET else None
    return Reason.NO_PROMPT if first is None or first[1] == b"]" else None


def _bypass_by_prompt(fields: RequestFields) -> Reason | None:
    if fields.prompt_embeds is not None:
        # Embeddings have no token ids, which the transfer counts by.
        return Reason.EMBEDS
    if fields.prompt is UNSET:
        return Reason.NO_PROMPT
    # A view: a prompt can be as long as the longest body, and only its beginning matters.
    prompt = memoryview(fields.prompt)
    if bytes(prompt[:1]) == b'"':
        return None if prompt.nbytes > len('""') else Reason.NO_PROMPT
    first = _FIRST_ITEM.match(prompt)
    if first is None or first[1] == b"]":
        return Reason.NO_PROMPT
    return Reason.BATCH if first[1] in (b'"', b"[") else None


def surely_short(fields: RequestFields, kind: PromptKind, block_size: int) -> bool:
    """Whether a completion's prompt is under one block whatever the tokenizer: by its bytes, or by its token ids."""
    if kind is not PromptKind.COMPLETION or isinstance(fields.prompt, UnsetType):
        return False
    prompt = memoryview(fields.prompt)
    if bytes(prompt[:1]) == b"[":
        return prompt.nbytes <= block_size * _LONGEST_ID and bytes(prompt).count(b",") + 1 < block_size
    # The quotes stand for what a tokenizer adds at most: a start token, and a space in front.
    return prompt.nbytes < block_size
