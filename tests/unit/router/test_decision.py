from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_pd.router.decision import (
    ClusterFacts,
    PromptKind,
    Reason,
    bypass_by_cluster,
    bypass_by_length,
    bypass_by_request,
)
from vllm_pd.router.request_fields import read_fields

FULL = ClusterFacts(prefill_alive=True, can_transfer=True)
CHAT = {"messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"prompt": "x"}


def reason(
    body: Any, kind: PromptKind | None = PromptKind.COMPLETION, facts: ClusterFacts = FULL, tokens: int | None = None
) -> Reason:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        bypass_by_request(read_fields(raw), kind)
        or bypass_by_cluster(facts)
        or bypass_by_length(tokens, 32)
        or Reason.SPLIT
    )


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, Reason.SPLIT),
        ({"n": 1}, Reason.SPLIT),
        ({"n": None}, Reason.SPLIT),
        ({"n": 2}, Reason.N),
        ({"n": "2"}, Reason.UNREADABLE),
        ({"best_of": 1}, Reason.SPLIT),
        ({"best_of": 2}, Reason.BEST_OF),
        ({"use_beam_search": True}, Reason.BEAM_SEARCH),
        ({"use_beam_search": False}, Reason.SPLIT),
        ({"echo": True}, Reason.ECHO),
        ({"echo": False}, Reason.SPLIT),
        ({"prompt_logprobs": 0}, Reason.PROMPT_LOGPROBS),
        ({"prompt_logprobs": None}, Reason.SPLIT),
        ({"logprobs": 5}, Reason.SPLIT),
        ({"max_tokens": 0}, Reason.ONE_TOKEN),
        ({"max_tokens": 1}, Reason.ONE_TOKEN),
        ({"max_tokens": 2}, Reason.SPLIT),
        ({"max_tokens": None}, Reason.SPLIT),
        ({"kv_transfer_params": {"do_remote_decode": True}}, Reason.OWN_TRANSFER),
        ({"kv_transfer_params": None}, Reason.OWN_TRANSFER),
        ({"truncate_prompt_tokens": -1}, Reason.TRUNCATION),
        ({"truncate_prompt_tokens": 100}, Reason.SPLIT),
        ({"some_unknown_field": {"n": 2}}, Reason.SPLIT),
    ],
)
@pytest.mark.parametrize("kind", list(PromptKind))
def test_each_field_decides_alone(kind: PromptKind, extra: dict[str, Any], expected: Reason) -> None:
    base = CHAT if kind is PromptKind.CHAT else COMPLETION
    assert reason({**base, **extra}, kind) is expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", Reason.SPLIT),
        ([1, 2, 3], Reason.SPLIT),
        ("", Reason.NO_PROMPT),
        ([], Reason.NO_PROMPT),
        (None, Reason.NO_PROMPT),
        (7, Reason.NO_PROMPT),
        (["text"], Reason.BATCH),
        (["a", "b"], Reason.BATCH),
        ([[1, 2]], Reason.BATCH),
    ],
)
def test_prompt_shapes(prompt: Any, expected: Reason) -> None:
    assert reason({"prompt": prompt}) is expected


def test_whitespace_inside_a_batch_does_not_hide_it() -> None:
    assert reason(b'{"prompt": [\n  "a", "b"]}') is Reason.BATCH
    assert reason(b'{"prompt": [  \t 1, 2]}') is Reason.SPLIT


def test_prompt_embeddings_go_whole() -> None:
    assert reason({"prompt_embeds": "AAAA"}) is Reason.EMBEDS
    assert reason({"prompt": "x", "prompt_embeds": "AAAA"}) is Reason.EMBEDS


def test_missing_prompt_or_messages_goes_whole_for_the_worker_to_refuse() -> None:
    assert reason({}) is Reason.NO_PROMPT
    assert reason({"messages": [{"role": "user"}]}) is Reason.NO_PROMPT
    assert reason({"prompt": "x"}, PromptKind.CHAT) is Reason.NO_PROMPT
    assert reason({"messages": []}, PromptKind.CHAT) is Reason.NO_PROMPT


def test_newer_name_of_the_token_limit_wins_in_chat_and_means_nothing_in_completions() -> None:
    both = {"max_tokens": 1, "max_completion_tokens": 50}
    assert reason({**CHAT, **both}, PromptKind.CHAT) is Reason.SPLIT
    assert reason({**CHAT, "max_tokens": 50, "max_completion_tokens": 1}, PromptKind.CHAT) is Reason.ONE_TOKEN
    assert reason({**COMPLETION, **both}) is Reason.ONE_TOKEN


@pytest.mark.parametrize(
    "body",
    [b"", b"not json", b"[]", b'"text"', b'{"prompt": "x"', b"\xff\xfe{}", b"[" * 100_000, b'{"prompt": "\\ud800"}'],
)
def test_what_is_no_json_object_goes_whole(body: bytes) -> None:
    assert reason(body) is Reason.UNREADABLE


def test_other_endpoints_are_never_split() -> None:
    assert reason(COMPLETION, None) is Reason.ENDPOINT


def test_cluster_without_prefill_or_transfer_goes_whole() -> None:
    assert reason(COMPLETION, facts=ClusterFacts(False, True)) is Reason.NO_PREFILL
    assert reason(COMPLETION, facts=ClusterFacts(True, False)) is Reason.NO_TRANSFER


@pytest.mark.parametrize(("tokens", "short"), [(0, True), (31, True), (32, False), (33, False), (None, False)])
def test_only_a_prompt_known_to_be_under_one_block_is_short(tokens: int | None, short: bool) -> None:
    assert bypass_by_length(tokens, 32) is (Reason.SHORT if short else None)
    assert reason(COMPLETION, tokens=tokens) is (Reason.SHORT if short else Reason.SPLIT)
