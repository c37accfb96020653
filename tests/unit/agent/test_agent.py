"""The agent against a real store that is there, away, killed, emptied or silent."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conformance.registry import FILES, POOL, newer, worker
from vllm_pd.agent.agent import Agent
from vllm_pd.agent.spec import AgentSpec
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state import TokenizerFiles, WorkerState, open_block_index, open_registry
from vllm_pd.state.redis_block_index import RedisBlockIndex
from vllm_pd.state.redis_registry import RedisRegistry

DEADLINE_S = 60.0
LEASE_S = 3.0
"""Short, so that a test can outwait it; long enough for a busy machine to renew it."""
RECORD = dataclasses.replace(worker(), tokenizer="")


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@pytest.fixture
def make(store: EmbeddedStore) -> Iterator[Callable[..., Agent]]:
    """Makes agents on the store, and stops them at the end."""
    agents: list[Agent] = []

    async def serves() -> bool:
        return True

    def make(serves: Callable[[], Any] = serves, **changes: Any) -> Agent:
        spec = AgentSpec(store=store.url, **({"record": RECORD, "lease_s": LEASE_S} | changes))
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


def workers(store: EmbeddedStore) -> tuple[WorkerState, ...]:
    async def ask() -> tuple[WorkerState, ...]:
        registry = RedisRegistry(store.url, "test", timeout_s=5.0)
        try:
            return (await registry.snapshot()).workers
        finally:
            await registry.close()

    return asyncio.run(ask())


def tokenizer(store: EmbeddedStore, sha: str) -> TokenizerFiles | None:
    async def ask() -> TokenizerFiles | None:
        registry = RedisRegistry(store.url, "test", timeout_s=10.0)
        try:
            return await registry.get_tokenizer(POOL.id, sha)
        finally:
            await registry.close()

    return asyncio.run(ask())


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def longer_than_the_lease() -> Iterator[None]:
    end = time.monotonic() + LEASE_S * 1.5
    while time.monotonic() < end:
        yield
        time.sleep(0.1)


def registered(store: EmbeddedStore) -> bool:
    return [state.record.id for state in workers(store)] == [RECORD.id]


def test_a_worker_registers_stays_and_withdraws(store: EmbeddedStore, make: Callable[..., Agent]) -> None:
    agent = make()
    agent.start()
    eventually(lambda: registered(store))
    # It lives because it is renewed.
    for _ in longer_than_the_lease():
        assert registered(store)
    assert agent.stop(DEADLINE_S)
    assert workers(store) == ()
    assert agent.stop(DEADLINE_S)


def test_nothing_is_registered_before_the_server_serves(store: EmbeddedStore, make: Callable[..., Agent]) -> None:
    answers = []

    async def serves() -> bool:
        answers.append(workers_seen := bool(await asyncio.to_thread(workers, store)))
        assert not workers_seen
        return len(answers) == 3

    make(serves).start()
    eventually(lambda: registered(store))
    assert len(answers) == 3


def test_a_worker_says_how_long_it_took_to_serve(store: EmbeddedStore, make: Callable[..., Agent]) -> None:
    ages = iter((42.04, 50.0, 60.0))
    make(age_s=lambda: next(ages)).start()
    for _ in longer_than_the_lease():
        eventually(lambda: registered(store))
        assert workers(store)[0].record.startup_s == 42.0


def test_an_agent_whose_server_never_serves_can_be_stopped(make: Callable[..., Agent]) -> None:
    async def serves() -> bool:
        return False

    agent = make(serves)
    agent.start()
    assert agent.stop(DEADLINE_S)


def test_the_load_of_every_engine_is_published_and_follows(store: EmbeddedStore, make: Callable[..., Agent]) -> None:
    agent = make()
    agent.observe(0, 3, 2, 0.5)
    agent.observe(1, 1, 0, 0.25)
    agent.start()
    eventually(lambda: any((w.running, w.waiting, w.kv_usage) == (4, 2, 0.5) for w in workers(store)))
    agent.observe(0, 0, 0, 0.0)
    eventually(lambda: any((w.running, w.waiting, w.kv_usage) == (1, 0, 0.25) for w in workers(store)))


def test_an_unchanged_load_stays_visible(store: EmbeddedStore, make: Callable[..., Agent]) -> None:
    agent = make()
    agent.observe(0, 3, 0, 0.5)
    agent.start()
    eventually(lambda: any(w.running == 3 for w in workers(store)))
    for _ in longer_than_the_lease():
        assert workers(store)[0].running == 3


def test_another_api_server_publishes_its_load_but_does_not_register(
    store: EmbeddedStore, make: Callable[..., Agent]
) -> None:
    second = make(is_registrar=False, writer=1, load_tokenizer=lambda: FILES)
    second.observe(1, 7, 0, 0.0)
    second.start()
    first = make()
    first.observe(0, 1, 0, 0.0)
    first.start()
    eventually(lambda: any(set(w.loads) == {0, 1} for w in workers(store)))
    assert workers(store)[0].running == 8
    assert tokenizer(store, FILES.sha) is None
    second.stop()
    assert registered(store)


def test_the_tokenizer_is_there_when_the_worker_is(store: EmbeddedStore, make: Callable[..., Agent]) -> None:
    make(load_tokenizer=lambda: FILES).start()
    eventually(lambda: registered(store))
    assert workers(store)[0].record.tokenizer == FILES.sha
    assert tokenizer(store, FILES.sha) == FILES


def test_an_unreadable_tokenizer_does_not_keep_the_worker_out(store: EmbeddedStore, make: Callable[..., Agent]) -> None:
    def load_tokenizer() -> TokenizerFiles:
        raise PermissionError("tokenizer.json")

    make(load_tokenizer=load_tokenizer).start()
    eventually(lambda: registered(store))
    assert workers(store)[0].record.tokenizer == ""


def test_a_store_that_is_away_at_the_start_is_waited_for(
    store: EmbeddedStore, make: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    store.kill()
    with caplog.at_level(logging.INFO, "vllm.vllm_pd"):
        make().start()
        eventually(lambda: "the store is lost" in caplog.text)
        time.sleep(1.0)
        store.start()
        eventually(lambda: registered(store))
        eventually(lambda: "is back." in caplog.text)
    assert caplog.text.count("the store is lost") == 1


def test_a_store_that_comes_back_empty_is_filled_again(
    store: EmbeddedStore, make: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    agent = make(load_tokenizer=lambda: FILES)
    agent.observe(0, 3, 0, 0.5)
    with caplog.at_level(logging.INFO, "vllm.vllm_pd"):
        agent.start()
        eventually(lambda: any(w.running == 3 for w in workers(store)))
        store.kill()
        eventually(lambda: "the store is lost" in caplog.text)
        store.start()
        eventually(lambda: any(w.running == 3 for w in workers(store)))
        eventually(lambda: "is back." in caplog.text)
    assert tokenizer(store, FILES.sha) == FILES
    assert caplog.text.count("the store is lost") == caplog.text.count("is back.") == 1


def test_a_silent_store_costs_neither_the_server_nor_its_end(
    store: EmbeddedStore, make: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    agent = make()
    agent.start()
    eventually(lambda: registered(store))
    store.pause()
    eventually(lambda: "did not answer within" in caplog.text)
    agent.observe(0, 1, 1, 0.1)
    assert agent.stop(DEADLINE_S)
    assert "could not be withdrawn" in caplog.text
    store.resume()
    eventually(lambda: workers(store) == ())


def test_a_silent_store_that_speaks_again_sees_the_worker(store: EmbeddedStore, make: Callable[..., Agent]) -> None:
    make().start()
    eventually(lambda: registered(store))
    store.pause()
    for _ in longer_than_the_lease():
        pass
    store.resume()
    eventually(lambda: registered(store))


def test_the_password_of_the_store_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def serves() -> bool:
        return True

    with EmbeddedStore(password="s3cret") as store, caplog.at_level(logging.DEBUG):
        url = store.url
        agent = Agent(
            AgentSpec(store=url, record=RECORD),
            lambda: RedisRegistry(url, "test", timeout_s=5.0),
            lambda: RedisBlockIndex(url, "test"),
            serves,
        )
        agent.start()
        eventually(lambda: "registered" in caplog.text)
        store.kill()
        eventually(lambda: "the store is lost" in caplog.text)
        agent.stop()
    assert "s3cret" not in caplog.text


def test_a_refused_password_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def serves() -> bool:
        return True

    with EmbeddedStore(password="s3cret") as store:
        url = store.url.replace("s3cret", "wr0ng")
        agent = Agent(
            AgentSpec(store=url, record=RECORD),
            lambda: RedisRegistry(url, "test", timeout_s=5.0),
            lambda: RedisBlockIndex(url, "test"),
            serves,
        )
        agent.start()
        eventually(lambda: "refused the user or password" in caplog.text)
        time.sleep(1.0)
        assert agent.stop(DEADLINE_S)
    assert caplog.text.count("refused the user or password") == 1
    assert "wr0ng" not in caplog.text


def test_an_older_start_stays_out_says_so_once_and_takes_over_when_the_newer_ends(
    store: EmbeddedStore, make: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    new = make(record=newer(RECORD))
    new.start()
    eventually(lambda: registered(store))
    old = make(lease_s=1.0)
    old.start()
    eventually(lambda: "--pd-advertise-url" in caplog.text)
    # It asks again in the meantime.
    time.sleep(2.5)
    assert [w.record.epoch for w in workers(store)] == [newer(RECORD).epoch]
    assert caplog.text.count("another process with a newer start") == 1
    assert RECORD.url in caplog.text
    new.stop()
    eventually(lambda: [w.record.epoch for w in workers(store)] == [RECORD.epoch])


def test_an_unforeseen_error_costs_one_try(
    store: EmbeddedStore, make: Callable[..., Agent], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failures = RedisRegistry.heartbeat, iter([RuntimeError("boom")] * 2)

    async def heartbeat(self: RedisRegistry, *args: Any) -> Any:
        if error := next(failures, None):
            raise error
        return await original(self, *args)

    monkeypatch.setattr(RedisRegistry, "heartbeat", heartbeat)
    make().start()
    eventually(lambda: registered(store))
    assert caplog.text.count("the store is lost") == 1
    assert "boom" in caplog.text


def test_a_settings_mistake_ends_the_agent_with_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    async def serves() -> bool:
        return True

    agent = Agent(
        AgentSpec(store="x://", record=RECORD),
        lambda: open_registry("x://", "test"),
        lambda: open_block_index("x://", "test"),
        serves,
    )
    agent.start()
    eventually(lambda: "is not registered" in caplog.text)
    assert agent.stop(DEADLINE_S)
    assert "must begin with one of redis://" in caplog.text
