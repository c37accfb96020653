"""The agent writes the block index of every engine of its worker: real publishers, real store."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.conformance.block_index import unpacked
from tests.conformance.registry import newer, worker
from tests.unit.agent.publisher import Publisher, removed, stored
from tests.unit.agent.test_agent import DEADLINE_S, LEASE_S, eventually, workers
from tests.unit.agent.test_block_truth import block, key
from vllm_pd.agent.agent import Agent
from vllm_pd.agent.kv_event_source import EventEndpoints
from vllm_pd.agent.spec import AgentSpec
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state import START, Holder, StreamEntry, WorkerRecord
from vllm_pd.state.redis_block_index import RedisBlockIndex
from vllm_pd.state.redis_registry import RedisRegistry

RECORD = dataclasses.replace(worker(), tokenizer="")


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[dict[int, Publisher]]:
    """Two engines that hold a block each: number 100 and 101."""
    made: dict[int, Publisher] = {}
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        made[rank] = Publisher(tmp_path / str(rank))
        made[rank].publish([stored([block(100 + rank)])])
    yield made
    for publisher in made.values():
        publisher.stop()


@pytest.fixture
def make(store: EmbeddedStore, engines: dict[int, Publisher]) -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    async def serves() -> bool:
        return True

    def make(record: WorkerRecord = RECORD, ranks: Any = None, **changes: Any) -> Agent:
        def sources() -> dict[int, EventEndpoints]:
            return {rank: engines[rank].endpoints for rank in (engines if ranks is None else ranks)}

        spec = AgentSpec(store=store.url, record=record, lease_s=LEASE_S, event_sources=sources, **changes)
        agent = Agent(
            spec,
            lambda: RedisRegistry(store.url, "test", timeout_s=1.0),
            lambda: RedisBlockIndex(store.url, "test", timeout_s=1.0),
            serves,
        )
        agents.append(agent)
        return agent

    yield make
    for agent in agents:
        agent.stop(DEADLINE_S)


def held(store: EmbeddedStore, rank: int, record: WorkerRecord = RECORD) -> dict[bytes, int] | None:
    async def ask() -> dict[bytes, int] | None:
        index = RedisBlockIndex(store.url, "test", timeout_s=5.0)
        try:
            found = await index.held(record.pool.id, Holder(record.id, rank), record.epoch)
        finally:
            await index.close()
        return None if found is None else unpacked(found.blocks)

    return asyncio.run(ask())


def entries(store: EmbeddedStore) -> Sequence[StreamEntry]:
    async def ask() -> Sequence[StreamEntry]:
        index = RedisBlockIndex(store.url, "test", timeout_s=5.0)
        try:
            return await index.read(RECORD.pool.id, START, wait_ms=0, limit=1000)
        finally:
            await index.close()

    return asyncio.run(ask())


def test_every_engine_is_in_the_index_until_the_worker_goes(
    store: EmbeddedStore, engines: dict[int, Publisher], make: Callable[..., Agent]
) -> None:
    agent = make()
    agent.start()
    for rank in engines:
        eventually(lambda rank=rank: held(store, rank) == {key(100 + rank): 1})  # type: ignore[misc]
    engines[1].publish([removed([block(101)]), stored([block(7)], "CPU")])
    eventually(lambda: held(store, 1) == {key(7): 2})
    assert held(store, 0) == {key(100): 1}
    eventually(lambda: REGISTRY.get_sample_value("vllm_pd_agent_blocks", {"rank": "1", "tier": "cpu"}) == 1)
    assert (REGISTRY.get_sample_value("vllm_pd_agent_kv_messages_total", {"rank": "1"}) or 0) >= 2
    assert agent.stop(DEADLINE_S)
    assert held(store, 0) is None and held(store, 1) is None


def test_an_engine_that_is_removed_leaves_the_index_and_one_that_is_added_comes(
    store: EmbeddedStore, make: Callable[..., Agent]
) -> None:
    ranks = [0]
    make(ranks=ranks).start()
    eventually(lambda: held(store, 0) == {key(100): 1})
    ranks[:] = [1]
    eventually(lambda: held(store, 1) == {key(101): 1})
    eventually(lambda: held(store, 0) is None)
    ranks[:] = [0, 1]
    eventually(lambda: held(store, 0) == {key(100): 1})
    # Readers take a number that they know for a change that they know.
    numbers = [entry.change.seq for entry in entries(store) if entry.holder.rank == 0]
    assert numbers == sorted(set(numbers))


def test_an_engine_that_publishes_elsewhere_is_followed_there(
    store: EmbeddedStore, engines: dict[int, Publisher], make: Callable[..., Agent]
) -> None:
    make(ranks=[0]).start()
    eventually(lambda: held(store, 0) == {key(100): 1})
    engines[0].endpoints, engines[1].endpoints = engines[1].endpoints, engines[0].endpoints
    eventually(lambda: held(store, 0) == {key(101): 1})


def test_a_store_that_comes_back_empty_is_told_everything_again(
    store: EmbeddedStore, make: Callable[..., Agent]
) -> None:
    make().start()
    eventually(lambda: held(store, 0) == {key(100): 1})
    store.kill()
    store.start()
    eventually(lambda: held(store, 0) == {key(100): 1} and held(store, 1) == {key(101): 1})


def test_a_worker_whose_place_is_taken_writes_nothing_until_it_has_it_again(
    store: EmbeddedStore, engines: dict[int, Publisher], make: Callable[..., Agent]
) -> None:
    other = newer(RECORD)
    second = make(other, ranks=[1])
    second.start()
    eventually(lambda: held(store, 1, other) == {key(101): 1})
    first = make(ranks=[0])
    first.start()
    engines[1].publish([stored([block(5)])])
    eventually(lambda: held(store, 1, other) == {key(101): 1, key(5): 1})
    assert held(store, 0) is None
    second.stop(DEADLINE_S)
    eventually(lambda: held(store, 0) == {key(100): 1})


def test_another_api_server_writes_no_index(store: EmbeddedStore, make: Callable[..., Agent]) -> None:
    second = make(is_registrar=False, writer=1)
    second.observe(1, 7, 0, 0.0)
    second.start()
    first = make()
    first.start()
    eventually(lambda: held(store, 0) == {key(100): 1})
    second.stop(DEADLINE_S)
    assert held(store, 0) == {key(100): 1}


def test_a_worker_whose_engines_cannot_be_asked_for_their_events_is_registered_all_the_same(
    store: EmbeddedStore, make: Callable[..., Agent]
) -> None:
    ranks: list[int] = []

    class Unanswered(list[int]):
        def __iter__(self) -> Iterator[int]:
            if not ranks:
                raise RuntimeError("no answer")
            return iter(ranks)

    make(ranks=Unanswered()).start()
    eventually(lambda: len(workers(store)) == 1)
    ranks.append(0)
    eventually(lambda: held(store, 0) == {key(100): 1})
