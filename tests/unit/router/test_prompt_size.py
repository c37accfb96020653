from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from vllm_pd.router.chat_template import ChatTemplate, TemplateFailed, special_tokens
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.prompt_size import prompt_tokens, worth_a_thread
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.router.request_fields import RequestFields, read_fields
from vllm_pd.state import TokenizerFiles

BLOCK = 32
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} "
    "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}{% if extra_words %} x y z{% endif %}"
)


def word_tokenizer() -> bytes:
    """One token a word, `<s>` in front when special tokens are asked for."""
    vocab = {"<s>": 0, "?": 1, "word": 2}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str().encode()


CONFIG = json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None}).encode()


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer(TokenizerFiles(word_tokenizer(), CONFIG, TEMPLATE))


def fields(body: dict[str, Any]) -> RequestFields:
    found = read_fields(json.dumps(body).encode())
    assert found is not None
    return found


def completion(tokenizer: PromptTokenizer | None, prompt: Any, **extra: Any) -> int | None:
    return prompt_tokens(fields({"prompt": prompt, **extra}), PromptKind.COMPLETION, BLOCK, tokenizer)


def chat(tokenizer: PromptTokenizer | None, content: Any, **extra: Any) -> int | None:
    body = {"messages": [{"role": "user", "content": content}], **extra}
    return prompt_tokens(fields(body), PromptKind.CHAT, BLOCK, tokenizer)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 5000])
def test_token_ids_are_counted_exactly(count: int) -> None:
    assert completion(None, list(range(count))) == count


@pytest.mark.parametrize(("size", "known"), [(1, True), (29, True), (30, False), (64, False)])
def test_text_without_tokenizer_is_short_only_where_its_bytes_prove_it(size: int, known: bool) -> None:
    found = completion(None, "a" * size)
    assert (found is not None) is known
    assert found is None or found < BLOCK


def test_bytes_not_characters_are_the_bound() -> None:
    assert completion(None, "é" * 20) is None


@pytest.mark.parametrize("words", [30, 31, 32])
def test_text_is_counted_with_the_tokens_that_the_tokenizer_adds(tokenizer: PromptTokenizer, words: int) -> None:
    assert completion(tokenizer, "word " * words) == words + 1
    assert completion(tokenizer, "word " * words, add_special_tokens=False) == words


def test_text_that_cannot_be_under_one_block_is_not_counted(tokenizer: PromptTokenizer) -> None:
    assert completion(tokenizer, "w" * (32 * BLOCK + 1)) is None
    assert completion(tokenizer, "w" * 1_000_000) is None


def test_chat_is_rendered_and_counted(tokenizer: PromptTokenizer) -> None:
    # <s>user, three words, assistant.
    assert chat(tokenizer, "one two three") == 6
    assert chat(tokenizer, "one two three", add_generation_prompt=False) == 5
    assert chat(tokenizer, "one two three", chat_template_kwargs={"extra_words": True}) == 9


@pytest.mark.parametrize(
    "extra",
    [
        {"chat_template": "{{ messages }}"},
        {"continue_final_message": True},
        {"tools": [{"x": "y" * 2000}]},
    ],
)
def test_chat_that_renders_in_another_way_is_of_unknown_length(
    tokenizer: PromptTokenizer, extra: dict[str, Any]
) -> None:
    assert chat(tokenizer, "hi", **extra) is None


@pytest.mark.parametrize("content", [[{"type": "image_url"}], 7])
def test_content_that_is_no_plain_text_is_of_unknown_length(tokenizer: PromptTokenizer, content: Any) -> None:
    assert chat(tokenizer, content) is None


def test_chat_without_a_template_is_of_unknown_length() -> None:
    assert chat(None, "hi") is None
    assert chat(PromptTokenizer(TokenizerFiles(word_tokenizer())), "hi") is None
    assert chat(PromptTokenizer(TokenizerFiles(word_tokenizer(), b"", "{% broken")), "hi") is None


def test_template_that_refuses_means_unknown_length() -> None:
    refusing = PromptTokenizer(TokenizerFiles(word_tokenizer(), b"", "{{ raise_exception('no') }}"))
    assert chat(refusing, "hi") is None


def test_unusable_tokenizer_file_says_so() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        PromptTokenizer(TokenizerFiles(b"{}"))


def test_long_prompts_are_worth_a_thread() -> None:
    assert not worth_a_thread(fields({"prompt": "x" * 100}), PromptKind.COMPLETION, 64)
    assert worth_a_thread(fields({"prompt": "x" * 10_000}), PromptKind.COMPLETION, 64)
    assert not worth_a_thread(fields({"prompt": "x" * 10_000}), PromptKind.CHAT, 64)


def test_prompts_too_long_to_be_counted_are_not_worth_a_thread(tokenizer: PromptTokenizer) -> None:
    long = fields({"prompt": "x" * 10_000})
    assert not worth_a_thread(long, PromptKind.COMPLETION, 16)
    assert prompt_tokens(long, PromptKind.COMPLETION, 16, tokenizer) is None


def test_deeply_nested_messages_are_of_unknown_length(tokenizer: PromptTokenizer) -> None:
    for depth in range(900, 1000):
        body = b'{"messages":[{"role":"user","content":' + b"[" * depth + b"]" * depth + b"}]}"
        nested = read_fields(body)
        if nested is not None:
            assert prompt_tokens(nested, PromptKind.CHAT, 64, tokenizer) is None


def render(source: str, **extra: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(
        [{"role": "user", "content": "<é>"}],
        tools=None,
        documents=None,
        add_generation_prompt=True,
        extra=extra,
    )


def test_templates_follow_hugging_face_conventions() -> None:
    assert render("{% if true %}\n  {% if true %}\nx{% endif %}\n{% endif %}\n") == "x"
    assert render("{{ messages[0]['content'] | tojson }}") == '"<é>"'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ bos_token }}{% generation %}a{% endgeneration %}") == "<s>a"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ mode }}", mode="on") == "on"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('x') }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ '{}'.format() }}",
    ],
)
def test_templates_run_in_a_sandbox_and_fail_cleanly(source: str) -> None:
    with pytest.raises(TemplateFailed):
        render(source)


def test_special_tokens_are_read_from_text_or_object() -> None:
    assert special_tokens(b'{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "x": 1}') == {
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    assert special_tokens(b"") == {}
    assert special_tokens(b"[]") == {}
