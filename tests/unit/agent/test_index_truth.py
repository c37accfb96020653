"""Whatever happens on the way, the index ends as what the engine holds: real sockets, real store, random faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from tests.conformance.block_index import EPOCH, HOLDER, POOL, Mirror, held
from tests.unit.agent.publisher import CLEARED, Publisher, removed, stored
from tests.unit.agent.test_block_truth import block, key
from vllm_pd.agent import cache_feed
from vllm_pd.agent.cache_feed import CacheFeed
from vllm_pd.agent.index_feeder import FeedLimits
from vllm_pd.agent.kv_event_source import EventEndpoints, SourceLimits
from vllm_pd.errors import StoreError
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state.redis_block_index import RedisBlockIndex

DEADLINE_S = 60.0
STORE_TIMEOUT_S = 0.3
SOURCE = SourceLimits(replay_s=1.0, replay_attempts=3, quiet_s=(0.05, 0.2))
FEED = FeedLimits(batch_blocks=64, waiting_blocks=400, announce_s=0.02, backoff_s=(0.02, 0.2))
CPU_EMPTIED = {"type": "BlockRemoved", "block_hashes": [], "medium": "CPU"}


class Engine:
    """A cache with several copies of a block on the GPU and one below it; says what it does as vLLM does."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._gpu: list[int] = []
        self._cpu: set[int] = set()

    def truth(self) -> dict[bytes, int]:
        gpu, cpu = set(self._gpu), self._cpu
        return {key(n): (1 if n in gpu else 0) | (2 if n in cpu else 0) for n in gpu | cpu}

    def step(self) -> list[Any]:
        """The events of one scheduler step."""
        chance = self._chance
        events: list[Any] = []
        evicted = [
            self._gpu.pop(chance.randrange(len(self._gpu)))
            for _ in range(min(len(self._gpu), chance.choice((0, 2, 30))))
        ]
        events += [removed([block(n)]) for n in evicted]
        new = [chance.randrange(500) for _ in range(chance.choice((1, 8, 40)))]
        self._gpu += new
        events.append(stored([block(n) for n in new]))
        if chance.random() < 0.5:
            copied = {n for n in new if n not in self._cpu}
            self._cpu |= copied
            events.append(stored([block(n) for n in sorted(copied)], "CPU"))
        if self._cpu and chance.random() < 0.3:
            dropped = chance.sample(sorted(self._cpu), min(5, len(self._cpu)))
            self._cpu -= set(dropped)
            events.append(removed([block(n) for n in dropped], "CPU"))
        return events

    def reset(self) -> list[Any]:
        self._gpu.clear()
        return [CLEARED]

    def sleep(self) -> list[Any]:
        self._cpu.clear()
        return [*self.reset(), CPU_EMPTIED]


class World:
    """Engine, publisher, agent and store of one run."""

    def __init__(self, folder: Path, store: EmbeddedStore, seed: int, buffer: int) -> None:
        self.chance = random.Random(seed)
        self.engine = Engine(self.chance)
        self.store = store
        self._folder = folder
        self._buffer = buffer
        self.publisher = Publisher(folder, buffer)
        self.index = RedisBlockIndex(store.url, "truth", timeout_s=STORE_TIMEOUT_S)
        self.feed = feed(self.index, self.publisher.endpoints)
        self.mirror = Mirror(self.index)

    def restart_engine(self) -> None:
        self.publisher.stop()
        self.engine = Engine(self.chance)
        self.publisher = Publisher(self._folder, self._buffer)

    async def trouble(self) -> None:
        """Something that happens to a cluster."""
        what = self.chance.randrange(8)
        if what == 0:
            self.restart_engine()
        elif what == 1:
            self.publisher.publish(self.engine.reset())
        elif what == 2:
            self.publisher.publish(self.engine.sleep())
        elif what == 3:
            await asyncio.to_thread(self.store.kill)
            await asyncio.to_thread(self.store.start)
        elif what == 4:
            self.store.pause()
            await asyncio.sleep(2 * STORE_TIMEOUT_S)
            self.store.resume()
        elif what == 5:
            redis.Redis.from_url(self.store.url).flushall()
        elif what == 6:
            self.publisher.publish([{"type": "OfAnotherKind"}])
        else:
            self.feed.feeder.allow(False)
            await asyncio.sleep(0.05)
            self.feed.feeder.allow(True)

    def publish(self) -> None:
        how = self.chance.choices(("send", "drop", "twice", "late"), (8, 1, 1, 1))[0]
        self.publisher.publish(self.engine.step(), how)

    async def seen(self) -> tuple[Any, Any]:
        """What the store says, and what a reader of its stream has."""
        try:
            await self.mirror.catch_up()
            return await held(self.index), self.mirror.blocks
        except (StoreError, AssertionError):
            # Away, or something was written meanwhile.
            return None, None


def feed(index: RedisBlockIndex, endpoints: EventEndpoints | None, limits: FeedLimits = FEED) -> CacheFeed:
    writer = index.writer(POOL, HOLDER, EPOCH, 60_000)
    return CacheFeed(HOLDER, writer, endpoints, ttl_ms=60_000, renew_s=0.5, source_limits=SOURCE, feed_limits=limits)


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@asynccontextmanager
async def world(folder: Path, store: EmbeddedStore, seed: int, buffer: int = 10_000) -> AsyncIterator[World]:
    made = World(folder, store, seed, buffer)
    made.feed.start()
    made.feed.feeder.allow(True)
    try:
        yield made
    finally:
        await made.feed.stop()
        await made.index.close()
        made.publisher.stop()


@pytest.mark.parametrize("seed", range(6))
async def test_index_and_readers_end_as_what_the_engine_holds(seed: int, tmp_path: Path, store: EmbeddedStore) -> None:
    async with world(tmp_path, store, seed) as w:
        for _ in range(8):
            for _ in range(w.chance.randrange(1, 25)):
                w.publish()
                if w.chance.random() < 0.3:
                    await asyncio.sleep(0.005)
                    await w.seen()
            await w.trouble()
        await equal(w, lambda: (w.engine.truth(), w.engine.truth()))


async def until(condition: Callable[[], bool], w: World) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 (the condition is somebody else's state)
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"it did not happen in time: {w.feed.feeder.stats}")


async def equal(w: World, wanted: Callable[[], tuple[Any, Any]]) -> None:
    seen: tuple[Any, Any] = (None, None)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while (seen := await w.seen()) != wanted():  # noqa: ASYNC110 (it is the store's state)
                await asyncio.sleep(0.05)
    except TimeoutError:
        store, reader = (_difference(got, right) for got, right in zip(seen, wanted(), strict=True))
        pytest.fail(f"the store {store}, its reader {reader}; {w.feed.feeder.stats}")


def _difference(got: Any, wanted: dict[bytes, int]) -> str:
    if got is None:
        return "has nothing"
    return f"has {len(got)} blocks, {len(set(got.items()) ^ set(wanted.items()))} differ"


@pytest.mark.parametrize("seed", range(2))
async def test_what_cannot_be_had_any_more_is_never_claimed(seed: int, tmp_path: Path, store: EmbeddedStore) -> None:
    async with world(tmp_path, store, seed, buffer=3) as w:
        for _ in range(60):
            for _ in range(w.chance.randrange(1, 8)):
                w.publisher.publish(w.engine.step(), w.chance.choice(("send", "drop", "drop")))
            await asyncio.sleep(0.02)
        last = 1000
        w.publisher.publish([*w.engine.step(), stored([block(last)])])
        await until(lambda: key(last) in told(w.feed), w)
        # What was learned since the last loss is in the index, and of it nothing is wrong.
        await equal(w, lambda: (told(w.feed), told(w.feed)))
        assert w.feed.source is not None and w.feed.source.stats.lost > 0
        truth = w.engine.truth() | {key(last): 1}
        assert all(truth.get(name, 0) & bits == bits for name, bits in told(w.feed).items())


async def test_an_unforeseen_error_costs_what_was_known_and_not_the_rest(
    tmp_path: Path, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_feed, "RETRY_S", 0.01)
    async with world(tmp_path, store, 0) as w:
        w.publish()
        await equal(w, lambda: (w.engine.truth(), w.engine.truth()))
        apply, failures = w.feed.truth.apply, [1, 2]

        def fail(events: Any) -> Any:
            if failures:
                raise KeyError(failures.pop())
            return apply(events)

        monkeypatch.setattr(w.feed.truth, "apply", fail)
        w.publisher.publish(w.engine.step())
        await until(lambda: not failures, w)
        w.publisher.publish(w.engine.step())
        await equal(w, lambda: (w.engine.truth(), w.engine.truth()))


def told(feed: CacheFeed) -> dict[bytes, int]:
    packed = feed.truth.held()
    return {data[at : at + 15]: bits for bits, data in packed.items() for at in range(0, len(data), 15)}


def churn(first: int, blocks: int, window: int) -> Iterator[bytes]:
    """Messages that store `blocks` blocks, `window` of which are held at a time."""
    for start in range(first, first + blocks, 250):
        new = [block(n) for n in range(start, start + 250)]
        gone = [block(n - window) for n in range(start, start + 250) if n - window >= 0]
        yield msgspec.msgpack.encode([0.0, [stored(new), removed(gone)], 0])


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(
    "blocks", [200_000, pytest.param(10_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
async def test_churn_leaves_memory_flat(blocks: int, store: EmbeddedStore) -> None:
    window = 20_000
    index = RedisBlockIndex(store.url, "truth", timeout_s=10.0)
    agent = feed(index, None, FeedLimits())
    agent.start()
    agent.feeder.allow(True)
    try:
        sizes: list[tuple[int, int]] = []
        for part in range(4):
            for payload in churn(part * blocks // 4, blocks // 4, window):
                agent.message(payload)
                while agent.feeder.waiting > 2000:  # noqa: ASYNC110 (what waits is the feeder's state)
                    await asyncio.sleep(0.001)
            sizes.append((resident_bytes(), resident_bytes(store.pid)))
        assert len(agent.truth) == window
        (ours_before, store_before), (ours, its) = sizes[1], sizes[-1]
        assert ours - ours_before < 8 << 20, sizes
        # The stream fills up to its bound.
        assert its - store_before < 80 << 20, sizes
    finally:
        await agent.stop()
        await index.close()
