"""Prompts as a router makes them from what a real worker published, against a real server's `/tokenize`."""

from __future__ import annotations

import random
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ask import Endpoint
from tests.unit.router import prompt_corpus
from vllm_pd.block_hash import BlockHasher
from vllm_pd.graph.local import LocalCluster
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.prompt_blocks import PromptBlocks, PromptHasher
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.router.request_fields import read_fields
from vllm_pd.state.base import PoolSpec, TokenizerFiles
from vllm_pd.state.open_registry import open_registry

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

PROMPTS = 320
NOT_OF_TOKENIZE = frozenset({"documents", "reasoning_effort", "tool_choice"})
"""Fields of a chat that `/tokenize` does not have."""


async def _published(cluster: LocalCluster) -> tuple[PoolSpec, TokenizerFiles]:
    registry = open_registry(cluster.store_url, cluster.namespace, timeout_s=5.0)
    try:
        record = (await registry.snapshot()).workers[0].record
        files = await registry.get_tokenizer(record.pool.id, record.tokenizer)
    finally:
        await registry.close()
    assert files is not None
    return record.pool, files


def _tokenize(server: Endpoint, body: dict[str, Any]) -> list[int] | None:
    try:
        found: list[int] = server.post("/tokenize", body)["tokens"]
    except urllib.error.HTTPError as e:
        assert e.code in (400, 422), e.read()
        return None
    return found


async def test_prompts_are_tokenized_and_hashed_as_the_server_does(
    cluster: LocalCluster, plain: Endpoint, tiny_model: Path
) -> None:
    spec, files = await _published(cluster)
    assert files.chat_template == (tiny_model / "chat_template.jinja").read_text()
    hasher, reference = PromptHasher(spec, PromptTokenizer(files)), BlockHasher(spec.block_size)
    draw = random.Random(11)
    equal = refused = unknown = 0
    for number in range(PROMPTS):
        chat = number % 4 != 3
        body = prompt_corpus.chat(draw) if chat else prompt_corpus.completion(draw)
        body = {key: value for key, value in body.items() if key not in NOT_OF_TOKENIZE} | {"model": plain.model}
        fields = read_fields(prompt_corpus.encoded(body))
        assert fields is not None
        ours = hasher.blocks(fields, PromptKind.CHAT if chat else PromptKind.COMPLETION)
        if isinstance(body.get("prompt"), list):
            theirs: list[int] | None = body["prompt"]
        else:
            theirs = _tokenize(plain, body)
        if ours.why_unknown:
            unknown += 1
        elif theirs is None:
            refused += 1
        else:
            assert ours == PromptBlocks(len(theirs), reference.keys(theirs)), body
            equal += 1
    assert equal >= 0.7 * PROMPTS, (equal, refused, unknown)


async def test_the_server_computed_the_prompt_that_the_router_expected(cluster: LocalCluster, plain: Endpoint) -> None:
    """By the ids that a chat's answer names: `/tokenize` is a path of its own."""
    spec, files = await _published(cluster)
    hasher, reference = PromptHasher(spec, PromptTokenizer(files)), BlockHasher(spec.block_size)
    draw = random.Random(12)
    seen = 0
    for _ in range(30):
        body = prompt_corpus.chat(draw) | {"model": plain.model, "max_tokens": 1, "return_token_ids": True}
        body.pop("tool_choice", None)
        body.pop("tools", None)
        fields = read_fields(prompt_corpus.encoded(body))
        assert fields is not None
        ours = hasher.blocks(fields, PromptKind.CHAT)
        if ours.why_unknown or ours.tokens > 1900:
            continue
        try:
            theirs = plain.post("/v1/chat/completions", body)["prompt_token_ids"]
        except urllib.error.HTTPError as e:
            assert e.code == 400, e.read()
            continue
        assert ours == PromptBlocks(len(theirs), reference.keys(theirs)), body
        seen += 1
    assert seen >= 15
