"""The real router in front of mock workers, through a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.sim.conftest import WAIT_S, Client, StartHost, until
from vllm_pd.router.service import RouterService
from vllm_pd.router.settings import RouterSettings
from vllm_pd.state.base import Role

BLOCK = 16
CHAT = "/v1/chat/completions"
TEXT = "Whether I shall turn out to be the hero of my own life, or whether that station will be held by anybody else. "

StartRouter = Callable[..., Awaitable[RouterService]]


@pytest.fixture
async def start_router() -> AsyncIterator[StartRouter]:
    """Starts a router and waits until it knows so many workers."""
    started: list[RouterService] = []

    async def start(workers: int, **settings: Any) -> RouterService:
        values = replace(RouterSettings(), port=0, shutdown_grace=1.0, **{"disagg": "always", **settings})
        service = RouterService(values, refresh_s=0.05)
        started.append(service)
        await service.start()
        await until(lambda: len(service.directory.workers) == workers, "the router knows every worker")
        return service

    yield start
    for service in started:
        await service.stop()


def chat(*contents: str, **fields: object) -> dict[str, object]:
    roles = ("user", "assistant")
    return {
        "model": "mock",
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)],
        **fields,
    }


async def test_split_requests_are_answered_and_leave_no_block_behind(
    start_workers: StartHost, start_router: StartRouter, client: Client, store_url: str
) -> None:
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    workers = await start_workers(roles, store=store_url, namespace="split")
    router = await start_router(4, store=store_url, namespace="split")
    url = f"http://127.0.0.1:{router.port}{CHAT}"
    replies = await asyncio.gather(
        *(client.post(url, chat(f"{i} {TEXT * 8}", max_tokens=20)) for i in range(30)),
        *(client.chunks(url, chat(f"{i} {TEXT * 8}", max_tokens=20)) for i in range(30, 40)),
    )
    assert all(reply[0] == 200 for reply in replies[:30])
    decoders = [worker for worker in workers if worker.role is Role.DECODE]
    assert sum(worker.counters.requests for worker in decoders) == 40
    fetched = sum(worker.counters.external_hits for worker in decoders)
    assert fetched > 0.5 * sum(worker.counters.prompt_tokens for worker in decoders)
    await until(lambda: all(worker.live.engine.pool.used == 0 for worker in workers), "all blocks are free")


async def test_a_refused_prefill_goes_to_another_worker(
    start_workers: StartHost, start_router: StartRouter, client: Client, store_url: str
) -> None:
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE)
    workers = await start_workers(roles, store=store_url, namespace="refused")
    router = await start_router(3, store=store_url, namespace="refused")
    await client.post(f"{workers[0].url}/mock/faults", {"status": 503})
    url = f"http://127.0.0.1:{router.port}{CHAT}"
    replies = await asyncio.gather(*(client.post(url, chat(f"{i} {TEXT * 8}", max_tokens=4)) for i in range(12)))
    assert [status for status, _ in replies] == [200] * 12
    assert workers[0].counters.requests == 0 < workers[1].counters.requests


async def test_every_turn_of_a_conversation_goes_where_its_prefix_is_and_hits_what_was_predicted(
    start_workers: StartHost, start_router: StartRouter, client: Client, store_url: str
) -> None:
    workers = await start_workers((Role.DECODE,) * 4, store=store_url, namespace="turns")
    router = await start_router(4, store=store_url, namespace="turns")
    url = f"http://127.0.0.1:{router.port}"
    for session in range(3):
        said = [f"{session} {TEXT * 4}"]
        homes = set()
        held = 0
        for turn in range(4):
            body = chat(*said, max_tokens=60)
            predicted = await _explained(client, url, body, held)
            before = [worker.counters.requests for worker in workers]
            _, reply = await client.post(url + CHAT, body)
            homes |= {i for i, worker in enumerate(workers) if worker.counters.requests > before[i]}
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == predicted * BLOCK
            # The last token of an answer is not computed.
            held = (reply["usage"]["total_tokens"] - 1) // BLOCK
            said += [reply["choices"][0]["message"]["content"], f"and {turn}? {TEXT}"]
        assert len(homes) == 1


async def test_after_an_eviction_the_next_turn_is_not_promised_what_is_gone(
    start_workers: StartHost, start_router: StartRouter, client: Client, store_url: str
) -> None:
    (worker,) = await start_workers(store=store_url, namespace="gone")
    router = await start_router(1, store=store_url, namespace="gone")
    url = f"http://127.0.0.1:{router.port}"
    _, reply = await client.post(url + CHAT, chat(TEXT * 4, max_tokens=10))
    body = chat(TEXT * 4, reply["choices"][0]["message"]["content"], "more", max_tokens=10)
    assert await _explained(client, url, body, 20) >= 20
    await client.post(f"{worker.url}/reset_prefix_cache", {})
    await _explained(client, url, body, 0, most=0)


async def _explained(client: Client, url: str, body: object, least: int, most: int = 1_000_000) -> int:
    """Wait until the router expects so many blocks of the prompt on the chosen worker's GPU; returns how many."""
    async with asyncio.timeout(WAIT_S):
        while True:
            status, record = await client.post(f"{url}/v1/explain", body)
            assert status == 200, record
            chosen = record["outcome"]["decode"]
            for scored in record["outcome"]["decoders"]:
                if [scored["worker"], scored.get("rank", 0)] == chosen and record["pools"][0].get(
                    "why_unknown", ""
                ) == "":
                    found = scored.get("overlap", {}).get("gpu", 0)
                    if least <= found <= most:
                        return int(found)
            await asyncio.sleep(0.02)
