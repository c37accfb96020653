"""Both legs of a split request held against vLLM's own code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_pd.router.legs import decode_body, prefill_body

pytestmark = pytest.mark.vllm

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
BOTH: list[dict[str, Any]] = [
    {},
    {"max_tokens": 50, "min_tokens": 20},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stop": ["x"], "stop_token_ids": [3], "include_stop_str_in_output": True, "ignore_eos": True},
    {"response_format": SCHEMA},
    {"structured_outputs": {"regex": "a+"}},
    {"n": 1, "echo": False, "temperature": 0, "seed": 3, "logit_bias": {"5": 1}, "bad_words": ["x"]},
    {"truncate_prompt_tokens": 7, "truncation_side": "left", "add_special_tokens": False, "priority": 3},
    {"cache_salt": "salt", "vllm_xargs": {"a": 1}, "return_token_ids": True, "request_id": "r", "unknown": 1},
    {"logprob_token_ids": [1, 2], "logprobs": 2},
]
CHAT: list[dict[str, Any]] = [
    {"max_completion_tokens": 50},
    {"logprobs": True, "top_logprobs": 5},
    {"logprobs": True, "logprob_token_ids": [1]},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "max_completion_tokens": 9},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "documents": [{"title": "t"}]},
    {"chat_template": "{{ messages }}", "mm_processor_kwargs": {"a": 1}, "return_prompt_text": True},
]


def _legs(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    raw = json.dumps(body).encode()
    return json.loads(prefill_body(raw)), json.loads(decode_body(raw, b'{"do_remote_prefill":true}'))


@pytest.mark.parametrize("extra", [*BOTH[:-1], *CHAT], ids=str)
def test_vllm_accepts_both_legs_of_a_chat_and_builds_one_prompt_from_them(extra: dict[str, Any]) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    first, second = (
        ChatCompletionRequest.model_validate(leg)
        for leg in _legs({"model": "m", "messages": [{"role": "user", "content": "hi"}], **extra})
    )
    assert first.max_tokens == 1
    assert first.max_completion_tokens in (None, 1)
    assert first.build_chat_params(None, "auto") == second.build_chat_params(None, "auto")
    for name in ("messages", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "cache_salt"):
        assert getattr(first, name) == getattr(second, name)
    assert first.to_sampling_params(1, {}).max_tokens == 1


@pytest.mark.parametrize("extra", BOTH, ids=str)
def test_vllm_accepts_both_legs_of_a_completion(extra: dict[str, Any]) -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    first, second = (CompletionRequest.model_validate(leg) for leg in _legs({"prompt": [1, 2, 3], **extra}))
    for name in ("prompt", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "cache_salt"):
        assert getattr(first, name) == getattr(second, name)
    sampling = first.to_sampling_params(1, {})
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop) == (1, 0, [])
    assert second.kv_transfer_params == {"do_remote_prefill": True}
