"""The agent and its prefill jobs: from its thread, with a real store and real HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.conformance.registry import worker
from tests.unit.agent.own_server import OK, StubServer, own_server, until
from tests.unit.agent.test_agent import workers
from vllm_pd.agent.agent import Agent
from vllm_pd.agent.spec import AgentSpec, PrefillSpec
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state import WorkerState, open_block_index, open_prefill_queue, open_registry
from vllm_pd.state.prefill_payload import PrefillRequest, decode_answer, encode_request
from vllm_pd.state.prefill_queue import JobId, PrefillJob, PrefillQueue

DEADLINE_S = 60.0
RECORD = dataclasses.replace(worker(), tokenizer="", claims=True)
POOL = RECORD.pool.id


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@pytest.fixture
async def queue(store: EmbeddedStore) -> AsyncIterator[PrefillQueue]:
    queue = open_prefill_queue(store.url, "test", timeout_s=5.0)
    await queue.announce_router(POOL, "r", 600_000)
    yield queue
    await queue.close()


@pytest.fixture
async def stub() -> AsyncIterator[StubServer]:
    async with own_server() as stub:
        yield stub


def agent_on(store: EmbeddedStore, stub: StubServer, grace_s: float = DEADLINE_S, **changes: Any) -> Agent:
    prefill = PrefillSpec(
        open_queue=lambda: open_prefill_queue(store.url, "test", timeout_s=1.0),
        server=stub.server,
        budget_tokens=1000,
        grace_s=grace_s,
    )
    return Agent(
        AgentSpec(store=store.url, lease_s=3.0, **({"record": RECORD, "prefill": prefill} | changes)),
        lambda: open_registry(store.url, "test", timeout_s=1.0),
        lambda: open_block_index(store.url, "test", timeout_s=1.0),
        stub.server.serves,
    )


async def put(queue: PrefillQueue, name: str, tokens: int = 100) -> None:
    asked = PrefillRequest(
        path="/v1/completions", headers=[], body=b"{}", deadline_ms=2**45, timeout_ms=60_000
    )  # fmt: skip
    assert await queue.put(POOL, PrefillJob(JobId(name), tokens, encode_request(asked), None, 0, "r"), 60_000)


async def result(queue: PrefillQueue) -> bytes:
    async with asyncio.timeout(DEADLINE_S):
        while not (found := await queue.results(POOL, "r", 500)):
            pass
    ((_, ended),) = found
    assert not ended.error
    return decode_answer(ended.data).body


async def registered(store: EmbeddedStore) -> tuple[WorkerState, ...]:
    return await asyncio.to_thread(workers, store)


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"vllm_pd_agent_prefill_{name}", labels) or 0.0


async def test_jobs_are_done_once_the_worker_is_registered_and_counted(
    store: EmbeddedStore, queue: PrefillQueue, stub: StubServer
) -> None:
    before = {how: metric("ended_total", how=how) for how in ("done", "failed", "returned", "lost")}
    await put(queue, "one")
    agent = agent_on(store, stub)
    assert agent.prefill_stats is None
    agent.start()
    try:
        assert await result(queue) == OK
        assert [state.record.claims for state in await registered(store)] == [True]
        stub.answer = stub.hold
        await put(queue, "two", 300)
        await until(lambda: metric("claimed_tokens") == 300)
        assert metric("budget_tokens") == 1000
        stub.may_end.set()
        assert await result(queue) == OK
        await until(lambda: metric("ended_total", how="done") == before["done"] + 2)
        after = {how: metric("ended_total", how=how) for how in before}
        assert after == before | {"done": before["done"] + 2}
        assert agent.prefill_stats is not None and agent.prefill_stats.claimed == 2
    finally:
        assert await asyncio.to_thread(agent.stop, DEADLINE_S)


async def test_an_agent_that_is_stopped_withdraws_at_once_and_ends_its_jobs_first(
    store: EmbeddedStore, queue: PrefillQueue, stub: StubServer
) -> None:
    stub.answer = stub.hold
    agent = agent_on(store, stub)
    agent.start()
    await put(queue, "one")
    await until(lambda: stub.open)
    # vLLM's shutdown waits for this much, and drains after it.
    assert await asyncio.to_thread(agent.stop, DEADLINE_S)
    assert await registered(store) == ()
    await put(queue, "late")
    assert stub.open == 1
    stub.may_end.set()
    assert await result(queue) == OK
    assert await asyncio.to_thread(agent.stop, DEADLINE_S, wait_for_jobs=True)
    assert len(stub.asked) == 1
    assert (await queue.depth(POOL, []))[None].waiting == 1


async def test_an_agent_without_grace_gives_its_jobs_back(
    store: EmbeddedStore, queue: PrefillQueue, stub: StubServer
) -> None:
    stub.answer = stub.hold
    agent = agent_on(store, stub, grace_s=0.0)
    agent.start()
    await put(queue, "one")
    await until(lambda: stub.open)
    assert await asyncio.to_thread(agent.stop, DEADLINE_S, wait_for_jobs=True)
    (job,) = await queue.jobs(POOL)
    assert (job.claimant, job.attempt) == ("", 0)


async def test_reports_of_the_engine_keep_its_jobs(
    store: EmbeddedStore, queue: PrefillQueue, stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_on(store, stub)
    notes = []
    monkeypatch.setattr(agent._progress, "note", notes.append)
    agent.observe(0, 3, 1, 0.5)
    assert notes == [3]


@pytest.mark.parametrize("changes", [{"prefill": None}, {"is_registrar": False}])
async def test_one_that_has_no_server_for_it_or_does_not_register_claims_nothing(
    store: EmbeddedStore, queue: PrefillQueue, stub: StubServer, changes: dict[str, Any]
) -> None:
    await put(queue, "one")
    agent = agent_on(store, stub, **changes)
    agent.start()
    ended = time.monotonic() + 0.5
    await until(lambda: time.monotonic() > ended)
    assert (await queue.depth(POOL, []))[None].waiting == 1
    assert agent.prefill_stats is None
    assert await asyncio.to_thread(agent.stop, DEADLINE_S)


async def test_an_older_start_of_the_worker_claims_nothing(
    store: EmbeddedStore, queue: PrefillQueue, stub: StubServer
) -> None:
    newer = agent_on(store, stub, record=dataclasses.replace(RECORD, epoch=RECORD.epoch + 1), prefill=None)
    newer.start()
    async with asyncio.timeout(DEADLINE_S):
        while not await registered(store):
            pass
    older = agent_on(store, stub)
    older.start()
    await put(queue, "one")
    ended = time.monotonic() + 1.0
    await until(lambda: time.monotonic() > ended)
    assert (await queue.depth(POOL, []))[None].waiting == 1
    for agent in (newer, older):
        assert await asyncio.to_thread(agent.stop, DEADLINE_S)
