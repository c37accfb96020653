"""The prefill leg and the prompt count held against vLLM's and transformers' own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_pd.router.chat_template import ChatTemplate, special_tokens
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.legs import decode_body, prefill_body
from vllm_pd.router.prompt_size import prompt_tokens
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.router.request_fields import read_fields
from vllm_pd.state import TokenizerFiles

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


TEMPLATES = [
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{{ bos_token }}{% for m in messages %}\n  {% if loop.index0 == 1 %}\n{% break %}{% endif %}\n"
    "{{ m['content'] | trim | tojson(indent=2) }}\n{% endfor %}",
    "{%- if tools %}{{ tools | tojson }}{% endif -%}{% generation %}{{ messages[-1].content }}{% endgeneration %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ flag }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_templates_render_as_in_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "system", "content": " <b>é</b> "}, {"role": "user", "content": "x\ny"}]
    theirs, _ = render_jinja_template(
        [messages], tools=[TOOL], chat_template=source, add_generation_prompt=True, bos_token="<s>", flag="on"
    )
    ours = ChatTemplate(source, {"bos_token": "<s>"}).render(
        messages, tools=[TOOL], documents=None, add_generation_prompt=True, extra={"flag": "on"}
    )
    assert [ours] == theirs


@pytest.mark.parametrize("content", ["hi", "Schöne Grüße, 世界! 🎉", "def f(x):\n    return x\n"])
def test_prompts_are_counted_as_transformers_tokenizes_them(tiny_model: Path, content: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_model)
    template = theirs.chat_template or TEMPLATES[0]
    config = (tiny_model / "tokenizer_config.json").read_bytes()
    ours = PromptTokenizer(TokenizerFiles((tiny_model / "tokenizer.json").read_bytes(), config, template))
    messages = [{"role": "user", "content": content}]
    ids = theirs.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, return_dict=False)
    chat, text = (read_fields(json.dumps(body).encode()) for body in ({"messages": messages}, {"prompt": content}))
    assert chat is not None
    assert text is not None
    assert prompt_tokens(chat, PromptKind.CHAT, 64, ours) == len(ids)
    assert prompt_tokens(text, PromptKind.COMPLETION, 64, ours) == len(theirs(content)["input_ids"])
    assert special_tokens(config).get("eos_token") == theirs.eos_token
