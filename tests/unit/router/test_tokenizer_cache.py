from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.unit.router.conftest import SPEC, until
from tests.unit.router.word_tokenizer import CONFIG, TEMPLATE, word_tokenizer
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.request_fields import read_fields
from vllm_pd.router.tokenizer_cache import MAX_TOKENIZERS, RETRY_S, TokenizerCache
from vllm_pd.router.tokenizer_metrics import TokenizerCollector
from vllm_pd.state import TokenizerFiles
from vllm_pd.state.memory_registry import MemoryRegistry
from vllm_pd.state.memory_store import MemoryStore


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def clock() -> Clock:
    return Clock()


@pytest.fixture
async def registry() -> MemoryRegistry:
    return MemoryRegistry("default", MemoryStore())


@pytest.fixture
async def cache(registry: MemoryRegistry, clock: Clock) -> AsyncIterator[TokenizerCache]:
    cache = TokenizerCache(registry, clock)
    yield cache
    await cache.close()


def files(number: int) -> TokenizerFiles:
    return TokenizerFiles(word_tokenizer(), CONFIG, TEMPLATE + str(number))


async def test_prefetched_tokenizer_is_there_at_the_first_request(
    registry: MemoryRegistry, cache: TokenizerCache
) -> None:
    sha = await registry.put_tokenizer(SPEC.id, files(0), 60_000)
    cache.prefetch(SPEC.id, sha)
    await until(lambda: not cache._tasks, "it was fetched")
    assert cache.get(SPEC.id, sha) is not None


async def test_prefetching_drives_no_other_tokenizer_out(registry: MemoryRegistry, cache: TokenizerCache) -> None:
    names = [await registry.put_tokenizer(SPEC.id, files(n), 60_000) for n in range(MAX_TOKENIZERS + 1)]
    for _ in range(2):
        for sha in names:
            cache.prefetch(SPEC.id, sha)
        await until(lambda: not cache._tasks, "they were fetched")
    assert set(cache._ready) == set(names[:-1])
    assert cache.get(SPEC.id, names[-1]) is None
    await until(lambda: names[-1] in cache._ready, "a request made room for it")
    assert len(cache._ready) == MAX_TOKENIZERS


async def test_missing_tokenizer_is_asked_for_again_later_only(
    registry: MemoryRegistry, cache: TokenizerCache, clock: Clock
) -> None:
    sha = files(0).sha
    assert cache.get(SPEC.id, sha) is None
    await until(lambda: not cache._tasks, "the store was asked")
    await registry.put_tokenizer(SPEC.id, files(0), 60_000)
    cache.prefetch(SPEC.id, sha)
    assert not cache._tasks
    clock.now += RETRY_S
    cache.prefetch(SPEC.id, sha)
    await until(lambda: not cache._tasks, "the store was asked again")
    assert cache.get(SPEC.id, sha) is not None


async def test_without_a_store_every_tokenizer_is_unknown(clock: Clock) -> None:
    cache = TokenizerCache(None, clock)
    cache.prefetch(SPEC.id, "0" * 64)
    assert cache.get(SPEC.id, "0" * 64) is None
    await asyncio.sleep(0)
    assert not cache._tasks


async def test_files_that_were_given_stand_for_whatever_workers_publish(clock: Clock) -> None:
    cache = TokenizerCache(None, clock, files(7))
    try:
        hasher = cache.hasher(SPEC, SPEC.id, "")
        await until(lambda: cache.get(SPEC.id, "other") is not None, "it was built")
        for sha in ("", "a", "b"):
            cache.prefetch(SPEC.id, sha)
            assert cache.get(SPEC.id, sha) is cache.get(SPEC.id, "a")
        assert cache.hasher(SPEC, SPEC.id, "") is not hasher
        assert len(cache.ready) == 1
    finally:
        await cache.close()


async def test_a_pools_hasher_is_kept_until_its_tokenizer_comes(
    registry: MemoryRegistry, cache: TokenizerCache
) -> None:
    sha = await registry.put_tokenizer(SPEC.id, files(0), 60_000)
    first = cache.hasher(SPEC, SPEC.id, sha)
    await until(lambda: bool(cache.ready), "it was fetched")
    second = cache.hasher(SPEC, SPEC.id, sha)
    assert second is not first
    assert cache.hasher(SPEC, SPEC.id, sha) is second
    assert cache.hasher(SPEC, SPEC.id, "") is not second


async def test_what_tokenizers_do_is_exported(registry: MemoryRegistry, cache: TokenizerCache) -> None:
    sha = await registry.put_tokenizer(SPEC.id, files(0), 60_000)
    cache.prefetch(SPEC.id, sha)
    await until(lambda: bool(cache.ready), "it was fetched")
    body = read_fields(b'{"messages": [{"role": "user", "content": "word word"}]}')
    assert body is not None
    assert cache.hasher(SPEC, SPEC.id, sha).blocks(body, PromptKind.CHAT).tokens == 5
    exported = {
        sample.name: sample.value for metric in TokenizerCollector(cache).collect() for sample in metric.samples
    }
    assert exported["vllm_pd_router_tokenizers"] == 1
    assert exported["vllm_pd_router_tokenizers_fast"] == int(cache.ready[0].encoder.fast)
    assert exported["vllm_pd_router_tokenizer_mismatches_total"] == cache.ready[0].encoder.mismatches
    assert exported["vllm_pd_router_prompt_cache_bytes"] > 0
