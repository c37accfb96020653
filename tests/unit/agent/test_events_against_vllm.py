"""The truth against vLLM's own block pool and offloading manager, and the source against vLLM's own publisher."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402

from tests.unit.agent.test_block_truth import block, held, stored  # noqa: E402
from tests.unit.agent.test_kv_event_source import Sink, following, until  # noqa: E402
from vllm_pd.agent.block_truth import BlockTruth  # noqa: E402
from vllm_pd.agent.kv_event_source import EventEndpoints  # noqa: E402
from vllm_pd.agent.kv_events import decode  # noqa: E402
from vllm_pd.connectors import event_flush  # noqa: E402

BLOCK_TOKENS = 4
NUMBERS = range(1, 60)


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def request(numbers: list[int]) -> Any:
    """As much of a request as the block pool looks at: its blocks have these numbers as hashes."""
    return SimpleNamespace(
        block_hashes=[block(n) for n in numbers],
        all_token_ids=[7] * (BLOCK_TOKENS * len(numbers)),
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
        session_id=None,
    )


def taken(pool: BlockPool) -> bytes:
    """The pool's events as they go over the wire."""
    return msgspec.msgpack.Encoder().encode(KVEventBatch(ts=time.time(), events=pool.take_events()))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_learned_from_a_block_pool_is_what_it_holds(seed: int) -> None:
    chance = random.Random(seed)
    pool = BlockPool(40, True, BLOCK_TOKENS, enable_kv_cache_events=True)
    truth = BlockTruth()
    running: list[list[Any]] = []
    for _ in range(400):
        what = chance.random()
        if what < 0.5 and pool.get_num_free_blocks() >= 8:
            numbers = chance.sample(NUMBERS, chance.randrange(1, 8))
            blocks = pool.get_new_blocks(len(numbers))
            # Also blocks that the pool holds already: it keeps both copies.
            pool.cache_full_blocks(request(numbers), blocks, 0, len(numbers), BLOCK_TOKENS, 0)
            running.append(blocks)
        elif what < 0.9 and running:
            pool.free_blocks(reversed(running.pop(chance.randrange(len(running)))))
        elif what < 0.97:
            pool.evict_blocks({chance.randrange(1, 40) for _ in range(3)})
        else:
            for blocks in running:
                pool.free_blocks(blocks)
            running.clear()
            assert pool.reset_prefix_cache()
        batch = decode(taken(pool))
        assert not batch.unreadable
        truth.apply(batch.events)
        wanted = {n for n in NUMBERS if pool.get_cached_block(block(n), [0]) is not None}
        assert set(held(truth)) == wanted
    assert truth.ignored == 0


def test_integer_hashes_are_no_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    pool = BlockPool(8, True, BLOCK_TOKENS, enable_kv_cache_events=True)
    pool.cache_full_blocks(request([1, 2]), pool.get_new_blocks(2), 0, 2, BLOCK_TOKENS, 0)
    truth = BlockTruth()
    truth.apply(decode(taken(pool)).events)
    assert len(truth) == 0 and truth.ignored == 1


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[ZmqEventPublisher]:
    made = ZmqEventPublisher(
        0, endpoint=f"ipc://{tmp_path}/inproc-live", replay_endpoint=f"ipc://{tmp_path}/inproc-replay", topic="vllm-pd"
    )
    yield made
    made.shutdown()


async def test_vllms_publisher_is_followed_from_its_first_message(publisher: ZmqEventPublisher) -> None:
    config = publisher.get_publisher_config()
    endpoints = EventEndpoints(config.endpoint, config.replay_endpoint, config.topic)

    def publish(n: int) -> None:
        events = [{"type": "BlockRemoved", "block_hashes": [n.to_bytes(32, "big")], "medium": "GPU"}]
        publisher.publish(KVEventBatch(ts=time.time(), events=events))

    # More than what the replay socket of vLLM 0.32 holds at once.
    for n in range(2500):
        publish(n)
    async with following(endpoints) as (sink, source):
        await until(lambda: len(sink.seen) >= 2500, sink)
        for n in range(2500, 2600):
            publish(n)
            await asyncio.sleep(0.001)
        await until(lambda: len(sink.seen) >= 2600, sink)
        assert sink.seen == list(range(2600))
        assert source.stats.lost == 0
    assert isinstance(sink, Sink)


class Scheduler:
    """The two resets of vLLM's scheduler, and what they touch."""

    def __init__(self, *, connector: bool = True) -> None:
        self.pool = BlockPool(8, True, BLOCK_TOKENS, enable_kv_cache_events=True)
        self.kv_cache_manager = self.pool
        self.published: list[list[Any]] = []
        self.kv_event_publisher = SimpleNamespace(publish=lambda batch: self.published.append(batch.events))
        self.connector = SimpleNamespace(take_events=lambda: iter(["copied"])) if connector else None
        self.works = True

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        done = self.pool.reset_prefix_cache()
        return (self.reset_connector_cache() and done) if reset_connector else done

    def reset_connector_cache(self) -> bool:
        return self.works


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> type[Scheduler]:
    class Wrapped(Scheduler):
        reset_prefix_cache = Scheduler.reset_prefix_cache
        reset_connector_cache = Scheduler.reset_connector_cache

    monkeypatch.setattr(event_flush.compat, "Scheduler", Wrapped, raising=False)
    event_flush.install()
    event_flush.install()
    return Wrapped


def names(batches: list[list[Any]]) -> list[list[str]]:
    return [[event if isinstance(event, str) else type(event).__name__ for event in batch] for batch in batches]


def test_a_reset_is_published_at_once(scheduler: type[Scheduler]) -> None:
    engine = scheduler()
    assert engine.reset_prefix_cache()
    assert names(engine.published) == [["AllBlocksCleared", "copied"]]


def test_a_reset_of_the_tiers_below_is_said_after_what_came_before_it(scheduler: type[Scheduler]) -> None:
    engine = scheduler()
    assert engine.reset_prefix_cache(reset_connector=True)
    first, *others = engine.published
    assert names([first]) == [["AllBlocksCleared", "copied", "BlockRemoved"]]
    assert (first[-1].block_hashes, first[-1].medium) == ([], "CPU")
    assert names(others) == [["copied"]]
    engine.works = False
    assert not engine.reset_prefix_cache(reset_connector=True)
    assert "BlockRemoved" not in names(engine.published)[-1]


def test_a_reset_without_a_tier_below_says_nothing_of_one(scheduler: type[Scheduler]) -> None:
    engine = scheduler(connector=False)
    assert engine.reset_prefix_cache(reset_connector=True)
    assert names(engine.published) == [["AllBlocksCleared"]]


def test_the_truth_after_sleep_and_wake_is_empty(scheduler: type[Scheduler]) -> None:
    engine = scheduler()
    engine.connector = SimpleNamespace(take_events=lambda: iter(()))
    truth = BlockTruth()
    blocks = engine.pool.get_new_blocks(2)
    engine.pool.cache_full_blocks(request([1, 2]), blocks, 0, 2, BLOCK_TOKENS, 0)
    engine.pool.free_blocks(blocks)
    truth.apply(decode(taken(engine.pool)).events)
    truth.apply([stored(1, medium="CPU")])
    assert held(truth) == {1: 3, 2: 1}
    # What putting an engine to sleep does, after which it makes no step.
    assert engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    for events in engine.published:
        truth.apply(decode(msgspec.msgpack.Encoder().encode(KVEventBatch(ts=0.0, events=events))).events)
    assert held(truth) == {}
