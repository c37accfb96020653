"""Prompts become blocks; what is kept of earlier prompts changes nothing but the time it takes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.router.conftest import BLOCK, SPEC
from tests.unit.router.prompt_corpus import TEXTS
from tests.unit.router.word_tokenizer import CONFIG, TEMPLATE, word_tokenizer
from vllm_pd.block_hash import BlockHasher, Lora, extra_keys
from vllm_pd.router.conversation import Unknown
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.model_folder import read_tokenizer_files
from vllm_pd.router.prompt_blocks import CHEAP_IDS, LONG_BYTES, SHORT_BYTES, PromptBlocks, PromptHasher
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.router.request_fields import RequestFields, read_fields
from vllm_pd.state import TokenizerFiles

HASHER = BlockHasher(BLOCK)


@pytest.fixture(scope="module")
def words() -> PromptTokenizer:
    return PromptTokenizer(TokenizerFiles(word_tokenizer(), CONFIG, TEMPLATE))


@pytest.fixture(scope="module")
def real(tiny_model: Path) -> PromptTokenizer:
    return PromptTokenizer(read_tokenizer_files(tiny_model))


def fields(body: dict[str, Any]) -> RequestFields:
    found = read_fields(json.dumps(body).encode())
    assert found is not None
    return found


def completion(
    tokenizer: PromptTokenizer | None, prompt: Any, *, lora: Lora | None = None, **extra: Any
) -> PromptBlocks:
    return PromptHasher(SPEC, tokenizer).blocks(fields({"prompt": prompt, **extra}), PromptKind.COMPLETION, lora=lora)


def chat(tokenizer: PromptTokenizer | None, content: Any, **extra: Any) -> PromptBlocks:
    body = {"messages": [{"role": "user", "content": content}], **extra}
    return PromptHasher(SPEC, tokenizer).blocks(fields(body), PromptKind.CHAT)


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5000])
def test_token_ids_are_hashed_as_they_are(count: int) -> None:
    ids = list(range(count))
    assert completion(None, ids) == PromptBlocks(count, HASHER.keys(ids))


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([[1, 2], [3]], Unknown.BATCH),
        (["a", "b"], Unknown.BATCH),
        ([1, -1], Unknown.BATCH),
        ({"a": 1}, Unknown.UNREADABLE),
        (None, Unknown.UNREADABLE),
        ("text", Unknown.NO_TOKENIZER),
    ],
)
def test_prompts_that_are_no_single_prompt_are_unknown(prompt: Any, why: Unknown) -> None:
    found = completion(None, prompt)
    assert (found.keys, found.why_unknown) == ((), why.value)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"prompt_embeds": "AA"}, Unknown.EMBEDS),
        ({"suffix": "x"}, Unknown.SUFFIX),
        ({"truncate_prompt_tokens": -1}, Unknown.TRUNCATION),
    ],
)
def test_completions_whose_prompt_changes_are_unknown(extra: dict[str, Any], why: Unknown) -> None:
    assert completion(None, [1, 2], **extra).why_unknown == why.value


def test_a_request_without_a_prompt_is_unknown(words: PromptTokenizer) -> None:
    hasher = PromptHasher(SPEC, words)
    for kind in PromptKind:
        assert hasher.cheap(fields({}), kind)
        assert hasher.blocks(fields({}), kind) == PromptBlocks(0, (), Unknown.NO_PROMPT.value)


@pytest.mark.parametrize("count", [30, 31, 32])
def test_text_is_counted_with_the_tokens_that_the_tokenizer_adds(words: PromptTokenizer, count: int) -> None:
    assert completion(words, "word " * count).tokens == count + 1
    assert completion(words, "word " * count, add_special_tokens=False).tokens == count
    ids = [0] + [2] * count
    assert completion(words, "word " * count) == completion(None, ids)


def test_chat_is_rendered_and_counted(words: PromptTokenizer) -> None:
    # <s>user, three words, assistant.
    assert chat(words, "one two three").tokens == 6
    assert chat(words, "one two three", add_special_tokens=True).tokens == 7
    assert chat(words, "one two three", add_generation_prompt=False).tokens == 5
    assert chat(words, "one two three", chat_template_kwargs={"extra_words": True}).tokens == 9


def test_the_workers_template_kwargs_count_unless_the_request_has_its_own() -> None:
    files = TokenizerFiles(word_tokenizer(), CONFIG, TEMPLATE, template_kwargs='{"extra_words": true}')
    tokenizer = PromptTokenizer(files)
    assert chat(tokenizer, "one").tokens == 7
    assert chat(tokenizer, "one", chat_template_kwargs={"extra_words": None}).tokens == 7
    assert chat(tokenizer, "one", chat_template_kwargs={"extra_words": False}).tokens == 4


def test_a_worker_with_template_kwargs_that_do_more_has_unknown_chats() -> None:
    files = TokenizerFiles(word_tokenizer(), CONFIG, TEMPLATE, template_kwargs='{"tools": []}')
    assert chat(PromptTokenizer(files), "one").why_unknown == Unknown.NO_TEMPLATE.value


def test_tools_have_a_template_of_their_own_if_the_model_has_one() -> None:
    files = TokenizerFiles(
        word_tokenizer(), CONFIG, TEMPLATE, tool_template="a b {{ tools | length }}", drops_unused_tools=True
    )
    tokenizer, tools = PromptTokenizer(files), [{"type": "function", "function": {"name": "f"}}]
    assert chat(tokenizer, "one", tools=tools).tokens == 3
    assert chat(tokenizer, "one", tools=tools, tool_choice="none").tokens == 4


@pytest.mark.parametrize(
    "files", [TokenizerFiles(word_tokenizer()), TokenizerFiles(word_tokenizer(), b"", "{% broken")]
)
def test_chat_without_a_template_is_unknown(files: TokenizerFiles) -> None:
    assert chat(PromptTokenizer(files), "hi").why_unknown == Unknown.NO_TEMPLATE.value
    assert chat(None, "hi").why_unknown == Unknown.NO_TOKENIZER.value


def test_a_template_that_refuses_means_unknown() -> None:
    refusing = PromptTokenizer(TokenizerFiles(word_tokenizer(), b"", "{{ raise_exception('no') }}"))
    assert chat(refusing, "hi").why_unknown == Unknown.REFUSED.value


def test_a_template_of_unknown_format_is_used_where_the_format_makes_no_difference() -> None:
    source = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    either = source + "{{ c.text }}{% endfor %}{% endif %}{% endfor %}"
    assert chat(PromptTokenizer(TokenizerFiles(word_tokenizer(), b"", either)), "a b").tokens == 2
    differs = source + "x{{ c.text }}{% endfor %}{% endif %}{% endfor %}"
    assert chat(PromptTokenizer(TokenizerFiles(word_tokenizer(), b"", differs)), "a b").why_unknown
    assert (
        chat(PromptTokenizer(TokenizerFiles(word_tokenizer(), b"", differs, content_format="openai")), "a b").tokens
        == 2
    )


def test_other_hash_algorithms_claim_nothing(words: PromptTokenizer) -> None:
    import dataclasses

    hasher = PromptHasher(dataclasses.replace(SPEC, hash_algo="xxhash"), words)
    for body, kind in (({"prompt": [1] * 64}, PromptKind.COMPLETION), ({"messages": []}, PromptKind.CHAT)):
        assert hasher.blocks(fields(body), kind).why_unknown == Unknown.HASH_ALGORITHM.value


@pytest.mark.parametrize("content", ["{}", "not json"])
def test_an_unusable_tokenizer_file_says_so(content: str) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        PromptTokenizer(TokenizerFiles(content.encode()))


def test_tokenizers_whose_result_depends_on_more_than_the_text_are_refused() -> None:
    from tokenizers import Tokenizer, models

    lottery = Tokenizer(models.BPE({"a": 0}, [], dropout=0.1)).to_str().encode()
    with pytest.raises(ValueError, match="draws lots"):
        PromptTokenizer(TokenizerFiles(lottery))
    with pytest.raises(ValueError, match="splits special tokens"):
        PromptTokenizer(TokenizerFiles(word_tokenizer(), b'{"split_special_tokens": true}'))


def test_deeply_nested_messages_are_unknown(words: PromptTokenizer) -> None:
    for depth in range(900, 1000, 7):
        body = b'{"messages":[{"role":"user","content":' + b"[" * depth + b"]" * depth + b"}]}"
        nested = read_fields(body)
        if nested is not None:
            assert PromptHasher(SPEC, words).blocks(nested, PromptKind.CHAT).why_unknown


def test_equal_prompts_of_other_adapters_and_salts_share_no_block(real: PromptTokenizer) -> None:
    hasher = PromptHasher(SPEC, real)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 200}]}
    found = [
        hasher.blocks(fields({**body, **extra}), PromptKind.CHAT, lora=lora)
        for lora in (None, Lora("a", "/a"), Lora("a", "/b"))
        for extra in ({}, {"cache_salt": "x"}, {"cache_salt": "y"})
    ]
    keys = [key for each in found for key in each.keys]
    assert len({each.tokens for each in found}) == 1
    assert len(keys) == len(set(keys)) > 9 * 4


# What is kept.

_contents = st.sampled_from([text for text in TEXTS if len(text) < 400]) | st.text(max_size=40)
_chats = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), _contents), min_size=1, max_size=6),
        st.booleans(),
        st.sampled_from([None, "salt"]),
        st.sampled_from([None, Lora("a", "/a")]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(chats=_chats, max_bytes=st.sampled_from([0, 2_000, 20_000, 1 << 20]), data=st.data())
def test_a_warm_hasher_gives_what_a_fresh_one_gives(
    real: PromptTokenizer, chats: list[Any], max_bytes: int, data: st.DataObject
) -> None:
    warm = PromptHasher(SPEC, real, max_bytes=max_bytes)
    for messages, special, salt, lora, repeat in chats:
        for end in (*range(1, len(messages) + 1), *[len(messages)] * repeat):
            body: dict[str, Any] = {"messages": [{"role": r, "content": c} for r, c in messages[:end]]}
            body |= {"add_special_tokens": special} | ({"cache_salt": salt} if salt else {})
            try:
                request = fields(body)
            except AssertionError:
                continue
            if data.draw(st.booleans()):
                warm.cheap(request, PromptKind.CHAT, lora=data.draw(st.sampled_from([lora, None])))
            ids = real.encode(real.render(request), add_special_tokens=special)
            expected = PromptBlocks(len(ids), HASHER.keys(ids, extra_keys(lora, salt)))
            assert warm.blocks(request, PromptKind.CHAT, lora=lora) == expected


def test_texts_of_one_length_and_end_are_told_apart(real: PromptTokenizer) -> None:
    hasher = PromptHasher(SPEC, real)
    end = " and so on, and so on, and so on." * 10
    for first in ("one", "two", "one", "two"):
        request = fields(
            {"messages": [{"role": "user", "content": first + end}, {"role": "assistant", "content": "x"}]}
        )
        ids = real.encode(real.render(request), add_special_tokens=False)
        assert hasher.blocks(request, PromptKind.CHAT) == PromptBlocks(len(ids), HASHER.keys(ids))


def test_a_text_that_begins_like_what_came_next_the_last_time_is_told_apart(real: PromptTokenizer) -> None:
    hasher = PromptHasher(SPEC, real)
    begin = {"role": "user", "content": "first " * 100}
    for last in ("word " * 50, "word " * 60, "word " * 50, "word " * 50 + "\n", "word " * 49, ""):
        for end in ([], [{"role": "user", "content": "and?"}]):
            messages = [begin, {"role": "assistant", "content": last}, *end]
            request = fields({"messages": messages, "add_generation_prompt": False})
            ids = real.encode(real.render(request), add_special_tokens=False)
            assert hasher.blocks(request, PromptKind.CHAT) == PromptBlocks(len(ids), HASHER.keys(ids))


@pytest.mark.parametrize("prompt", ["", "<|end|>", "<|end|><|end|>x", "x<|end|>", "word " * 100])
def test_texts_are_the_same_once_they_are_known(real: PromptTokenizer, prompt: str) -> None:
    hasher = PromptHasher(SPEC, real)
    request = fields({"prompt": prompt, "add_special_tokens": False})
    ids = real.encode(prompt, add_special_tokens=False)
    for _ in range(3):
        assert hasher.blocks(request, PromptKind.COMPLETION) == PromptBlocks(len(ids), HASHER.keys(ids))


def test_threads_and_the_loop_may_hash_at_once(real: PromptTokenizer) -> None:
    hasher = PromptHasher(SPEC, real, max_bytes=30_000)
    requests = [
        fields(
            {"messages": [{"role": "user", "content": f"{n % 3} " * 50}] + [{"role": "user", "content": "x" * n}] * 4}
        )
        for n in range(40)
    ]
    expected = [PromptHasher(SPEC, real).blocks(request, PromptKind.CHAT) for request in requests]
    wrong: list[int] = []

    def work(offset: int) -> None:
        for n in range(len(requests)):
            at = (n * 7 + offset) % len(requests)
            hasher.cheap(requests[at], PromptKind.CHAT)
            if hasher.blocks(requests[at], PromptKind.CHAT) != expected[at]:
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_long_prompts_are_cheap_once_they_are_known(tiny_model: Path) -> None:
    tokenizer = PromptTokenizer(read_tokenizer_files(tiny_model), fast=False)
    hasher = PromptHasher(SPEC, tokenizer)
    long = [{"role": "user", "content": f"{n} " * 1000} for n in range(8)]
    first, second = fields({"messages": long}), fields({"messages": [*long, {"role": "user", "content": "and?"}]})
    assert not hasher.cheap(first, PromptKind.CHAT)
    hasher.blocks(first, PromptKind.CHAT)
    assert hasher.cheap(first, PromptKind.CHAT)
    assert hasher.cheap(second, PromptKind.CHAT)
    # Another beginning: nothing is known of the chain, but its texts are.
    third = fields({"messages": [{"role": "user", "content": "else"}, *long]})
    assert hasher.cheap(third, PromptKind.CHAT)


def test_what_is_too_long_to_render_at_once_is_never_cheap(real: PromptTokenizer) -> None:
    hasher = PromptHasher(SPEC, real)
    assert hasher.cheap(fields({"prompt": "x" * (SHORT_BYTES - 2)}), PromptKind.COMPLETION)
    assert not hasher.cheap(fields({"prompt": "x" * LONG_BYTES}), PromptKind.COMPLETION)
    assert hasher.cheap(fields({"prompt": [1] * CHEAP_IDS}), PromptKind.COMPLETION)
    assert not hasher.cheap(fields({"prompt": [1] * (CHEAP_IDS + 1)}), PromptKind.COMPLETION)


def test_memory_is_bounded(real: PromptTokenizer) -> None:
    hasher = PromptHasher(SPEC, real, max_bytes=100_000)
    for n in range(300):
        body = {"messages": [{"role": "user", "content": f"{n} " * 200}, {"role": "user", "content": "x"}]}
        assert hasher.blocks(fields(body), PromptKind.CHAT).keys
    assert hasher.kept_bytes <= 100_000
