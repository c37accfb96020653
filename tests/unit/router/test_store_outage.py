"""A router on a real store that starts late, dies, restarts empty or stops answering."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import aiohttp
import pytest

from tests.unit.router.conftest import BLOCK, LONG, SPEC, StartWorker, record, until
from tests.unit.router.word_tokenizer import CONFIG, TEMPLATE, word_tokenizer
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.router.service import RouterService
from vllm_pd.router.settings import RouterSettings
from vllm_pd.state import Registry, Role, TokenizerFiles
from vllm_pd.state.open_registry import open_registry


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@pytest.fixture
async def registry(store: EmbeddedStore) -> AsyncIterator[Registry]:
    """The workers' side."""
    registry = open_registry(store.url, "default", timeout_s=10.0)
    yield registry
    await registry.close()


@pytest.fixture
async def router(store: EmbeddedStore) -> AsyncIterator[RouterService]:
    service = RouterService(replace(RouterSettings(), port=0, store=store.url, shutdown_grace=1.0, disagg="always"))
    await service.start()
    yield service
    await service.stop()


async def call(router: RouterService, path: str, body: object = None) -> tuple[int, bytes]:
    url = f"http://127.0.0.1:{router.port}{path}"
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as client,
        client.request("POST" if body else "GET", url, json=body) as reply,
    ):
        return reply.status, await reply.read()


async def ready(router: RouterService) -> None:
    """Wait until the router wants requests."""
    async with asyncio.timeout(20):
        while (await call(router, "/ready"))[0] != 200:  # noqa: ASYNC110 - readiness has no event
            await asyncio.sleep(0.02)


BODY = {"prompt": LONG, "max_tokens": 9}


async def test_router_serves_through_an_outage_and_recovers_by_itself(
    store: EmbeddedStore, registry: Registry, router: RouterService, start_worker: StartWorker
) -> None:
    prefill, decode = await start_worker(), await start_worker()
    entries = [record(prefill, Role.PREFILL), record(decode, Role.DECODE)]
    for lease_ms in (60_000, 4_000):
        for entry in entries:
            await registry.heartbeat(entry, lease_ms)
        await until(lambda: len(router.directory.workers) == 2, "the workers are known")
    await until(lambda: max(w.lease_span for w in router.directory.workers) <= 4, "so is what is left of their leases")
    store.kill()
    await until(lambda: not router.directory.store.up, "the outage is noticed")
    assert (await call(router, "/v1/completions", BODY))[0] == 200
    code, answer = await call(router, "/ready")
    assert code == 200
    assert json.loads(answer)["store"]["up"] is False
    assert json.loads(answer)["store"]["problem"]
    assert b"vllm_pd_router_store_up 0.0" in (await call(router, "/metrics"))[1]
    # It comes back empty, and only one of the workers is still there.
    store.start()
    await until(lambda: router.directory.store.up, "the store is back")
    assert len(router.directory.workers) == 2
    await registry.heartbeat(entries[1], 60_000)
    await until(lambda: [w.id for w in router.directory.workers] == [entries[1].id], "the other one's lease ran out")
    assert (await call(router, "/v1/completions", BODY))[0] == 200


async def test_store_that_dies_while_the_decode_worker_is_late_does_not_cost_a_request(
    store: EmbeddedStore, registry: Registry, router: RouterService, start_worker: StartWorker
) -> None:
    """As on a machine that stood still: a lease ended, and the store is gone before the worker can renew it."""
    prefill, decode = await start_worker(), await start_worker()
    await registry.heartbeat(record(prefill, Role.PREFILL), 60_000)
    await registry.heartbeat(record(decode, Role.DECODE), 60_000)
    await until(lambda: len(router.directory.workers) == 2, "the workers are known")
    await registry.heartbeat(record(decode, Role.DECODE), 1)
    await until(lambda: [w.id for w in router.directory.workers] == [prefill.host_port], "the lease ended")
    assert (await call(router, "/v1/completions", BODY))[0] == 200
    store.kill()
    await until(lambda: not router.directory.store.up, "the outage is noticed")
    assert (await call(router, "/v1/completions", BODY))[0] == 200
    assert (await call(router, "/ready"))[0] == 200
    await decode.stop()
    code, answer = await call(router, "/v1/completions", BODY)
    assert code == 503
    assert b"No worker that decodes is alive" in answer
    assert (await call(router, "/ready"))[0] == 503


async def test_store_that_stops_answering_does_not_hold_up_requests(
    store: EmbeddedStore, registry: Registry, router: RouterService, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    await registry.heartbeat(record(worker, Role.BOTH), 60_000)
    await until(lambda: len(router.directory.workers) == 1, "the worker is known")
    store.pause()
    try:
        await until(lambda: not router.directory.store.up, "the silence is noticed")
        assert (await call(router, "/v1/completions", BODY))[0] == 200
    finally:
        store.resume()
    await until(lambda: router.directory.store.up, "the store is back")


async def test_router_starts_without_its_store_and_finds_workers_later(
    store: EmbeddedStore, registry: Registry, start_worker: StartWorker
) -> None:
    store.kill()
    service = RouterService(replace(RouterSettings(), port=0, store=store.url, disagg="always"))
    await service.start()
    try:
        await until(lambda: service.directory.store.problem, "the store was asked")
        assert (await call(service, "/health"))[0] == 200
        code, answer = await call(service, "/ready")
        assert code == 503
        assert "store does not answer" in json.loads(answer)["reason"]
        store.start()
        worker = await start_worker()
        await registry.heartbeat(record(worker, Role.BOTH), 60_000)
        await until(lambda: len(service.directory.workers) == 1, "the worker is known")
        assert (await call(service, "/v1/completions", BODY))[0] == 200
    finally:
        await service.stop()


async def test_short_chat_goes_whole_as_the_tokenizer_came_from_the_store_with_the_workers(
    registry: Registry, router: RouterService, start_worker: StartWorker
) -> None:
    prefill, decode = await start_worker(), await start_worker()
    prefill.tokenize = decode.tokenize = lambda _: None
    files = TokenizerFiles(word_tokenizer(), CONFIG, TEMPLATE)
    sha = await registry.put_tokenizer(SPEC.id, files, 60_000)
    for worker, role in ((prefill, Role.PREFILL), (decode, Role.DECODE)):
        await registry.heartbeat(record(worker, role, tokenizer=sha), 60_000)
    await until(lambda: len(router.directory.workers) == 2, "the workers are known")

    async def chat(words: int) -> bool:
        """Whether the request was split. The template adds three words of its own around the content's."""
        before = len(prefill.posts)
        body = {"messages": [{"role": "user", "content": "word " * words}], "max_tokens": 9}
        assert (await call(router, "/v1/chat/completions", body))[0] == 200
        return len(prefill.posts) > before

    await until(lambda: sha in router._tokenizers._ready, "the tokenizer is loaded before any request")
    assert not await chat(BLOCK - 4)
    assert await chat(BLOCK - 3)
    assert not await chat(1)
