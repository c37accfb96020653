"""Which requests' streams can be continued, and what the continuation asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_pd.router import continuable
from vllm_pd.router.continuable import UNKNOWN_FIELD, answer_limit, asking_ids, continuation_body, read_body, why_not
from vllm_pd.router.decision import PromptKind

CHAT, COMPLETION = PromptKind.CHAT, PromptKind.COMPLETION
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "[1]"}]}]


def reason(kind: PromptKind, fields: dict[str, Any]) -> str:
    prompt = {"messages": MESSAGES} if kind is CHAT else {"prompt": "once"}
    return why_not(read_body(json.dumps({**prompt, "model": "m", "stream": True, **fields}).encode()), kind)


@pytest.mark.parametrize("kind", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1},
        {"seed": None, "stop": None, "logprobs": None, "tools": None, "response_format": None, "nonsense": None},
        {"n": 1, "stop": [], "presence_penalty": 0.0, "frequency_penalty": 0, "bad_words": [], "tool_choice": "none"},
        {"response_format": {"type": "text"}, "echo": False, "logprobs": False, "include_reasoning": True},
        {"logit_bias": {"5": 1.0}, "allowed_token_ids": [1], "stop_token_ids": [2], "min_tokens": 3},
    ],
)
def test_what_looks_at_single_steps_can_be_continued(kind: PromptKind, fields: dict[str, Any]) -> None:
    assert reason(kind, fields) == ""


@pytest.mark.parametrize("kind", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("best_of", 3),
        ("seed", 0),
        ("stop", "x"),
        ("stop", ["x"]),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("prompt_logprobs", 0),
        ("echo", True),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("bad_words", ["x"]),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a"}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("include_reasoning", False),
        ("thinking_token_budget", 5),
        ("watermarking", True),
        ("vllm_xargs", {"a": 1}),
        ("repetition_detection", {}),
        ("kv_transfer_params", {}),
        ("prompt_embeds", "AA=="),
    ],
)
def test_what_looks_at_the_answer_alone_or_keeps_a_state_cannot(kind: PromptKind, name: str, value: Any) -> None:
    assert reason(kind, {name: value}) == name


def test_a_field_that_is_not_known_forbids_it() -> None:
    assert reason(CHAT, {"new_penalty": 1}) == UNKNOWN_FIELD


@pytest.mark.parametrize(
    "part",
    [
        '{"type":"image_url","image_url":{"url":"x"}}',
        '{"\\u0074ype":"image_url"}',
        '{"type":"input_audio"}',
        # vLLM takes these for images, too.
        '{"image_url":"x"}',
        '{"type":null,"image_url":"x"}',
        '{"type":"text","uuid":"1","image_url":"x"}',
    ],
)
def test_media_forbid_it(part: str) -> None:
    body = '{"messages":[{"role":"user","content":[{"type":"text","text":"a"},' + part + "]}]}"
    assert why_not(read_body(body.encode()), CHAT) == continuable.MEDIA


@pytest.mark.parametrize(
    ("prompt", "is_one"),
    [
        ('"a"', True),
        ("[1, 2]", True),
        ("[ 1]", True),
        ('["a"]', False),
        ("[[1]]", False),
        ("[]", False),
        ("null", False),
        ("7", False),
    ],
)
def test_one_prompt_of_text_or_ids_is_needed(prompt: str, is_one: bool) -> None:
    found = why_not(read_body(b'{"prompt":%b}' % prompt.encode()), COMPLETION)
    assert found == ("" if is_one else continuable.PROMPT_FORM)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages":7}', b'{"messages":[[1]]}'])
def test_what_cannot_be_read_is_not_continued(body: bytes) -> None:
    assert why_not(read_body(body), CHAT)


@pytest.mark.parametrize("value", [b'"\xff"', b"1e999", b'{"type":"\xc3"}'])
def test_a_value_that_only_a_worker_can_judge_is_not_continued(value: bytes) -> None:
    body = b'{"messages":[{"content":"a"}],"frequency_penalty":%b,"stream":true}' % value
    assert why_not(read_body(body), CHAT) == continuable.UNREADABLE


@pytest.mark.parametrize(
    ("kind", "fields", "limit"),
    [
        (CHAT, {}, None),
        (CHAT, {"max_tokens": 5}, 5),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 9}, 9),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": None}, 5),
        (COMPLETION, {}, 16),
        (COMPLETION, {"max_tokens": None}, 16),
        (COMPLETION, {"max_tokens": 7, "max_completion_tokens": 9}, 7),
    ],
)
def test_the_limit_is_the_one_that_vllm_takes(kind: PromptKind, fields: dict[str, Any], limit: int | None) -> None:
    members = read_body(json.dumps(fields).encode())
    assert members is not None
    assert answer_limit(members, kind) == limit


def test_a_request_for_ids_wins_over_the_clients_own_word() -> None:
    assert json.loads(asking_ids(b'{"return_token_ids": false, "n": 1} ')) == {"return_token_ids": True, "n": 1}


def test_the_continuation_of_an_answer_that_has_not_begun_is_the_prompt() -> None:
    members = read_body(b'{"messages":[],"max_tokens":9,"min_tokens":2}')
    assert members is not None
    assert json.loads(continuation_body(members, b"1,2", [], 9)) == {
        "prompt": [1, 2], "max_tokens": 9, "min_tokens": 2, "stream": True,
    }  # fmt: skip


def test_every_field_of_vllm_is_either_allowed_or_named_as_one_that_forbids_it() -> None:
    """A field that a newer vLLM brings is refused until somebody has looked at it; this test says so."""
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    completion = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    fields = {*protocol.ChatCompletionRequest.model_fields, *completion.CompletionRequest.model_fields}
    weird = {"weird": 1}
    unknown = {name for name in fields - {"messages", "prompt"} if reason(CHAT, {name: weird}) == UNKNOWN_FIELD}
    assert not unknown


def test_the_limit_of_a_completion_that_names_none_is_that_of_vllm() -> None:
    completion = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    assert completion.CompletionRequest(prompt="a").max_tokens == continuable.DEFAULT_MAX_TOKENS
