from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_pd.router.decision import PromptKind, Reason, bypass_by_request, surely_short
from vllm_pd.router.request_fields import read_fields

CHAT = {"messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"prompt": "x"}


def reason(body: Any, kind: PromptKind | None = PromptKind.COMPLETION) -> Reason:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return bypass_by_request(read_fields(raw), kind) or Reason.SPLIT


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
        ({"routed_experts_prompt_start": 0}, Reason.ROUTED_EXPERTS),
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


def short(prompt: Any, kind: PromptKind = PromptKind.COMPLETION) -> bool:
    fields = read_fields(json.dumps({"prompt": prompt}, ensure_ascii=False).encode())
    assert fields is not None
    return surely_short(fields, kind, 32)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x" * 29, True),
        ("x" * 30, False),
        ("ö" * 14, True),
        ("ö" * 15, False),
        ([7] * 31, True),
        ([7] * 32, False),
        ([123_456] * 31, True),
        ([7] * 100_000, False),
        (None, True),
    ],
)
def test_completion_prompt_is_short_only_where_its_bytes_or_ids_prove_it(prompt: Any, expected: bool) -> None:
    assert short(prompt) is expected


def test_chat_of_unknown_length_is_never_short() -> None:
    fields = read_fields(json.dumps(CHAT).encode())
    assert fields is not None
    assert not surely_short(fields, PromptKind.CHAT, 32)
