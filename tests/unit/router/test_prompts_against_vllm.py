"""The router's prompts held against vLLM's own rendering and tokenizing code, by token ids and block keys."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.router import prompt_corpus
from tests.unit.router.conftest import SPEC
from vllm_pd.block_hash import BlockHasher
from vllm_pd.router.conversation import Unknown
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.prompt_blocks import PromptBlocks, PromptHasher
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.router.request_fields import read_fields

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from tests.unit.router.engine_prompts import EnginePrompts  # noqa: E402
from vllm_pd.agent.tokenizer_files import Rendering  # noqa: E402

HASHER = BlockHasher(SPEC.block_size)
KNOWN_ENOUGH = 0.75
"""Share of the prompts served by vLLM that must be known: the corpus has some forms that are not meant to be."""


def blocks(hasher: PromptHasher, body: bytes) -> PromptBlocks:
    fields = read_fields(body)
    assert fields is not None
    kind = PromptKind.CHAT if b'"messages"' in body else PromptKind.COMPLETION
    hasher.cheap(fields, kind)
    return hasher.blocks(fields, kind)


def compare(engine: EnginePrompts, hasher: PromptHasher, bodies: list[prompt_corpus.Body]) -> Counter[str]:
    """Fails on a prompt that is not the engine's; counts what was known."""
    seen: Counter[str] = Counter()
    for body in bodies:
        raw = prompt_corpus.encoded(body)
        ours, theirs = blocks(hasher, raw), engine.token_ids(raw)
        if theirs is None or ours.why_unknown:
            seen["refused" if theirs is None else "unknown"] += 1
            assert not ours.keys or theirs is None
            continue
        assert ours == PromptBlocks(len(theirs), HASHER.keys(theirs)), raw.decode()
        seen["equal"] += 1
    return seen


def turns(draw: random.Random, count: int, *, odd: bool = False) -> list[prompt_corpus.Body]:
    """Requests of which some go on where an earlier one ended."""
    out = []
    for _ in range(count):
        body = prompt_corpus.chat(draw, odd=odd)
        out.append(body)
        if draw.random() < 0.3:
            more = [prompt_corpus.message(draw, role, odd=odd) for role in ("assistant", "user")]
            out.append({**body, "messages": [*body["messages"], *more]})
    return out


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
@pytest.mark.parametrize("fast", [True, False])
def test_chats_and_completions_of_real_models_are_the_engines(
    name: str, fast: bool, request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(f"{name}_model")
    engine, draw = EnginePrompts(model), random.Random(name)
    hasher = PromptHasher(SPEC, PromptTokenizer(engine.files(), fast=fast))
    bodies = turns(draw, 70) + [prompt_corpus.completion(draw) for _ in range(30)]
    seen = compare(engine, hasher, bodies)
    assert seen["equal"] >= 80
    assert seen["equal"] >= KNOWN_ENOUGH * (seen["equal"] + seen["unknown"]), seen


@pytest.mark.parametrize("template", prompt_corpus.TEMPLATES)
@pytest.mark.parametrize("odd", [False, True])
def test_chats_of_any_template_and_form_are_the_engines(tiny_model: Path, template: str, odd: bool) -> None:
    draw = random.Random(template)
    rendering = Rendering(
        chat_template=prompt_corpus.TEMPLATES[template],
        template_kwargs=draw.choice([{}, {"enable_thinking": False, "mode": None}]),
        drops_unused_tools=draw.random() < 0.5,
    )
    engine = EnginePrompts(tiny_model, rendering)
    hasher = PromptHasher(SPEC, PromptTokenizer(engine.files()))
    seen = compare(engine, hasher, turns(draw, 50, odd=odd))
    if not odd:
        assert seen["equal"]
        assert seen["equal"] >= KNOWN_ENOUGH * (seen["equal"] + seen["unknown"]), seen


@pytest.mark.parametrize("content_format", ["string", "openai"])
def test_a_content_format_that_the_server_was_told_is_followed(tiny_model: Path, content_format: str) -> None:
    draw = random.Random(3)
    source = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    engine = EnginePrompts(tiny_model, Rendering(chat_template=source, content_format=content_format))
    hasher = PromptHasher(SPEC, PromptTokenizer(engine.files()))
    assert compare(engine, hasher, turns(draw, 40))["equal"] > 20


def test_salts_are_hashed_as_the_engine_hashes_them(tiny_model: Path) -> None:
    """By a `Request` of vLLM's: `test_block_hash` has the details."""
    from vllm_pd.block_hash import extra_keys

    engine = EnginePrompts(tiny_model)
    hasher = PromptHasher(SPEC, PromptTokenizer(engine.files()))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 100}]}
    plain, salted = (prompt_corpus.encoded(each) for each in (body, {**body, "cache_salt": "abc"}))
    ids = engine.token_ids(salted)
    assert ids is not None
    assert blocks(hasher, salted).keys == HASHER.keys(ids, extra_keys(cache_salt="abc"))
    assert not set(blocks(hasher, salted).keys) & set(blocks(hasher, plain).keys)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            Unknown.MEDIA,
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, Unknown.MEDIA),
        ({"messages": []}, Unknown.NO_PROMPT),
        ({"messages": [{"role": "user", "content": 7}]}, Unknown.MESSAGE),
        ({"messages": [{"role": "critic", "content": "x"}]}, Unknown.MESSAGE),
        ({"messages": [7]}, Unknown.UNREADABLE),
        ({"chat_template": "{{ messages }}"}, Unknown.OWN_TEMPLATE),
        ({"chat_template_kwargs": {"tools": []}}, Unknown.TEMPLATE_KWARGS),
        ({"chat_template_kwargs": [1]}, Unknown.TEMPLATE_KWARGS),
        ({"reasoning_effort": "extreme"}, Unknown.TEMPLATE_KWARGS),
        ({"tools": [{"type": "custom"}]}, Unknown.TOOLS),
        ({"truncate_prompt_tokens": 5}, Unknown.TRUNCATION),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, Unknown.REUSED_IDS),
        ({"cache_salt": ""}, Unknown.CACHE_SALT),
        ({"continue_final_message": True}, Unknown.REFUSED),
    ],
    ids=str,
)
def test_what_may_come_out_differently_is_unknown(tiny_model: Path, change: dict[str, Any], why: Unknown) -> None:
    hasher = PromptHasher(SPEC, PromptTokenizer(EnginePrompts(tiny_model).files()))
    body = {"messages": [{"role": "user", "content": "word " * 100}], **change}
    found = blocks(hasher, prompt_corpus.encoded(body))
    assert (found.keys, found.why_unknown) == ((), why.value)
