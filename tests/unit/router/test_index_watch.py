"""Mirrors of the block index held against what the writers wrote, over memory and over a real store."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest

from tests.unit.router.conftest import until
from tests.unit.router.test_directory import SPEC, state
from vllm_pd.block_hash import KEY_BYTES, BlockKey
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.router import index_watch
from vllm_pd.router.directory import Directory
from vllm_pd.router.index_watch import IndexWatch, PoolMirror
from vllm_pd.router.worker import Source
from vllm_pd.state import (
    BlockIndex,
    BlockWriter,
    Epoch,
    Holder,
    MemoryBlockIndex,
    MemoryStore,
    Packed,
    PoolId,
    Position,
    StreamEntry,
    WorkerId,
    open_block_index,
)

POOL = SPEC.id
GPU, CPU = 1, 2


def key(n: int) -> BlockKey:
    return n.to_bytes(KEY_BYTES, "big")


def packed(*numbers: int) -> Packed:
    return b"".join(map(key, numbers))


def holder(name: str, rank: int = 0) -> Holder:
    return Holder(WorkerId(name), rank)


class Agent:
    """Writes one cache and knows the truth about it."""

    def __init__(self, index: BlockIndex, name: str, epoch: int = 1) -> None:
        self.holder = holder(name)
        self.truth: dict[BlockKey, int] = {}
        self.writer: BlockWriter = index.writer(POOL, self.holder, Epoch(epoch), 60_000)

    async def replace(self) -> Agent:
        by_bits: dict[int, list[BlockKey]] = {}
        for name, bits in self.truth.items():
            by_bits.setdefault(bits, []).append(name)
        await self.writer.replace({bits: b"".join(keys) for bits, keys in by_bits.items()})
        return self

    async def write(self, bits: int, *numbers: int) -> None:
        for n in numbers:
            if bits:
                self.truth[key(n)] = bits
            else:
                self.truth.pop(key(n), None)
        await self.writer.write({bits: packed(*numbers)})


class Followed:
    """A directory of workers and a watch on an index."""

    def __init__(self, index: BlockIndex) -> None:
        self.directory = Directory(time.monotonic, store_configured=True)
        self.watch = IndexWatch(index, self.directory, time.monotonic)

    async def join(self, *names: str, epoch: int = 1) -> None:
        self.directory.replace(Source.STORE, [state(name, epoch=epoch) for name in names])
        await self.watch.refresh()

    @property
    def mirror(self) -> PoolMirror:
        (mirror,) = self.watch.mirrors
        return mirror

    def equals(self, *agents: Agent) -> bool:
        prefixes = self.mirror.prefixes
        wanted = {agent.holder: agent.truth for agent in agents}
        return self.mirror.loaded and {h: prefixes.held(h) for h in prefixes.holders()} == wanted


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def index(memory: MemoryStore) -> BlockIndex:
    return MemoryBlockIndex("default", memory)


Follow = Callable[[BlockIndex], Followed]


@pytest.fixture
async def follow(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Follow]:
    monkeypatch.setattr(index_watch, "RETRY_S", 0.02)
    made: list[Followed] = []

    def start(index: BlockIndex) -> Followed:
        made.append(Followed(index))
        return made[-1]

    yield start
    for followed in made:
        await followed.watch.close()


async def test_what_was_held_before_and_what_is_written_later_are_both_there(index: BlockIndex, follow: Follow) -> None:
    agent = await Agent(index, "a").replace()
    await agent.write(GPU, 1, 2, 3)
    followed = follow(index)
    await followed.join("a")
    await until(lambda: followed.equals(agent), "the snapshot is there")
    await agent.write(0, 2)
    await agent.write(GPU | CPU, 1, 4)
    await until(lambda: followed.equals(agent), "the changes are there")
    assert followed.mirror.counts.snapshots == 1


async def test_watches_that_start_amid_writing_agree_with_the_truth(index: BlockIndex, follow: Follow) -> None:
    chance = random.Random(5)
    agents = [await Agent(index, name).replace() for name in ("a", "b", "c")]
    watches = []
    for turn in range(300):
        agent = chance.choice(agents)
        if chance.random() < 0.03:
            await agent.replace()
        else:
            await agent.write(chance.choice([0, 0, GPU, CPU, GPU | CPU]), *chance.sample(range(200), 20))
        if turn % 100 == 10:
            watches.append(follow(index))
            await watches[-1].join("a", "b", "c")
        await asyncio.sleep(0)
    for followed in watches:
        await until(lambda f=followed: f.equals(*agents), "it equals the truth")  # type: ignore[misc]


class Losing:
    """An index of which some stream entries do not arrive."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self.lose = False
        self.read_whole: list[Holder] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._index, name)

    async def held(self, pool: PoolId, holder: Holder, epoch: Epoch) -> object:
        self.read_whole.append(holder)
        return await self._index.held(pool, holder, epoch)

    async def read(self, pool: PoolId, after: Position, *, wait_ms: int, limit: int = 256) -> Sequence[StreamEntry]:
        entries = await self._index.read(pool, after, wait_ms=wait_ms, limit=limit)
        return entries[-1:] if self.lose else entries


async def test_gap_makes_only_that_cache_be_read_again(index: BlockIndex, follow: Follow) -> None:
    agents = [await Agent(index, name).replace() for name in ("a", "b")]
    losing = Losing(index)
    followed = follow(losing)  # type: ignore[arg-type]
    await followed.join("a", "b")
    await until(lambda: followed.equals(*agents), "it is loaded")
    losing.read_whole.clear()
    losing.lose = True
    await asyncio.gather(agents[0].write(GPU, 1), agents[0].write(GPU, 2), agents[0].write(GPU, 3))
    await until(lambda: followed.mirror.counts.gaps, "the gap was seen")
    losing.lose = False
    await agents[1].write(GPU, 4)
    await until(lambda: followed.equals(*agents), "it equals the truth again")
    assert set(losing.read_whole) == {agents[0].holder}


async def test_new_epoch_in_the_stream_ends_the_old_one_at_once(index: BlockIndex, follow: Follow) -> None:
    old = await Agent(index, "a", epoch=1).replace()
    await old.write(GPU, 1, 2)
    followed = follow(index)
    await followed.join("a")
    await until(lambda: followed.equals(old), "it is loaded")
    new = await Agent(index, "a", epoch=2).replace()
    await new.write(GPU, 7)
    await until(lambda: followed.equals(new), "the old blocks are gone")
    # The directory learns of the restart later, and the dead process's last words come even later.
    await followed.join("a", epoch=2)
    old.writer = index.writer(POOL, old.holder, Epoch(1), 60_000)
    await old.replace()
    await new.write(GPU, 8)
    await until(lambda: followed.equals(new), "the old epoch changes nothing")


async def test_new_epoch_in_the_directory_is_enough_to_forget_the_old_one(index: BlockIndex, follow: Follow) -> None:
    old = await Agent(index, "a").replace()
    await old.write(GPU, 1, 2)
    followed = follow(index)
    await followed.join("a")
    await until(lambda: followed.equals(old), "it is loaded")
    await followed.join("a", epoch=2)
    silent = Agent(index, "a", epoch=2)
    await until(lambda: followed.equals(silent), "nothing of it is left")


async def test_an_older_process_that_has_its_place_back_is_followed_and_the_newer_no_more(
    index: BlockIndex, follow: Follow
) -> None:
    old = await Agent(index, "a", epoch=1).replace()
    await old.write(GPU, 1, 2)
    followed = follow(index)
    await followed.join("a", epoch=1)
    new = await Agent(index, "a", epoch=2).replace()
    await new.write(GPU, 7)
    await followed.join("a", epoch=2)
    await until(lambda: followed.equals(new), "the newer one has the place")
    # It crashed, and the older one was there again before the worker was ever seen missing.
    await followed.join("a", epoch=1)
    await until(lambda: not followed.mirror.prefixes.blocks(old.holder), "nothing of the newer one is claimed")
    await old.replace()
    await until(lambda: followed.equals(old), "the older one says what it holds")
    await new.write(GPU, 8)
    await old.write(GPU, 3)
    await until(lambda: followed.equals(old), "its last words, read late, change nothing")
    await followed.join("a", epoch=2)
    await until(lambda: followed.equals(new), "the newer one lived after all")


async def test_a_list_of_workers_from_before_a_restart_does_not_undo_what_the_stream_said(
    index: BlockIndex, follow: Follow
) -> None:
    old = await Agent(index, "a", epoch=1).replace()
    followed = follow(index)
    await followed.join("a", epoch=1)
    await until(lambda: followed.equals(old), "it is loaded")
    new = await Agent(index, "a", epoch=2).replace()
    await new.write(GPU, 7)
    await until(lambda: followed.equals(new), "the stream has said it")
    other = await Agent(index, "b").replace()
    await followed.join("a", "b", epoch=1)
    await until(lambda: followed.equals(new, other), "the restarted worker keeps its blocks")


async def test_worker_that_leaves_takes_its_blocks_along_and_only_those(index: BlockIndex, follow: Follow) -> None:
    agents = [await Agent(index, name).replace() for name in ("a", "b")]
    for agent in agents:
        await agent.write(GPU, 1, 2, 3)
    followed = follow(index)
    await followed.join("a", "b")
    await until(lambda: followed.equals(*agents), "it is loaded")
    await followed.join("b")
    await until(lambda: followed.equals(agents[1]), "one is left")
    await followed.join("a", "b")
    await until(lambda: followed.equals(*agents), "it is back")


async def test_pool_without_workers_is_not_followed(index: BlockIndex, follow: Follow) -> None:
    followed = follow(index)
    await followed.join("a")
    await until(lambda: followed.mirror.loaded, "it is loaded")
    await followed.join()
    # All gone at once may be the store's fault: the directory keeps them for their lease, which is over here.
    followed.directory._workers.clear()
    await followed.watch.refresh()
    assert followed.watch.mirrors == []
    assert followed.watch.mirror(POOL) is None


async def test_each_rank_of_a_worker_is_a_cache_of_its_own(index: BlockIndex, follow: Follow) -> None:
    writer = index.writer(POOL, holder("a", 1), Epoch(1), 60_000)
    await writer.replace({GPU: packed(1, 2)})
    followed = follow(index)
    entry = state("a")
    from dataclasses import replace

    followed.directory.replace(Source.STORE, [replace(entry, record=replace(entry.record, dp_size=2))])
    await followed.watch.refresh()
    await until(lambda: followed.mirror.loaded, "it is loaded")
    assert {h: followed.mirror.prefixes.blocks(h) for h in (holder("a", 0), holder("a", 1))} == {
        holder("a", 0): 0,
        holder("a", 1): 2,
    }


async def test_other_tasks_run_while_a_large_cache_is_taken_over(
    index: BlockIndex, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_watch, "SLICE_S", 0.0)
    monkeypatch.setattr(index_watch, "SLICE_BLOCKS", 100)
    agent = Agent(index, "a")
    agent.truth = {key(n): GPU for n in range(10_000)}
    await agent.replace()
    followed = follow(index)
    await followed.join("a")
    turns = 0
    while not followed.equals(agent):
        turns += 1
        await asyncio.sleep(0)
        assert turns < 100_000
    assert turns >= 100
    await followed.join("a", epoch=2)
    turns = 0
    while followed.mirror.prefixes.blocks(agent.holder):
        turns += 1
        await asyncio.sleep(0)
        assert turns < 10_000_000
    assert turns >= 100


async def test_unforeseen_error_costs_a_new_reading_and_not_the_index(
    index: BlockIndex, follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    agent = await Agent(index, "a").replace()
    followed = follow(index)
    await followed.join("a")
    await until(lambda: followed.equals(agent), "it is loaded")

    class Broken(dict[int, bytes]):
        def items(self) -> object:  # type: ignore[override]
            raise RuntimeError("nobody foresaw this")

    await agent.writer.write({GPU: packed(1)})
    agent.truth[key(1)] = GPU
    await until(lambda: followed.equals(agent), "it goes on")
    followed.mirror._caches[agent.holder].seq -= 1
    followed.mirror._unread.add(holder("unknown"))
    await until(lambda: "is read again" in caplog.text, "the error was logged")
    followed.mirror._unread.discard(holder("unknown"))
    await agent.write(GPU, 2)
    await until(lambda: followed.equals(agent), "it equals the truth again")


# On a real store.


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@pytest.fixture
async def remote(store: EmbeddedStore) -> AsyncIterator[BlockIndex]:
    index = open_block_index(store.url, "default")
    yield index
    await index.close()


async def test_two_routers_on_one_store_agree(store: EmbeddedStore, remote: BlockIndex, follow: Follow) -> None:
    agents = [await Agent(remote, name).replace() for name in ("a", "b")]
    other = open_block_index(store.url, "default")
    try:
        one, two = follow(remote), follow(other)
        await one.join("a", "b")
        for n in range(50):
            await agents[n % 2].write(GPU, *range(n * 10, n * 10 + 10))
        await two.join("a", "b")
        await agents[0].write(0, *range(20))
        for followed in (one, two):
            await until(lambda f=followed: f.equals(*agents), "it equals the truth")  # type: ignore[misc]
        keys = [key(n) for n in range(30, 60)]
        assert one.mirror.prefixes.lookup(keys) == two.mirror.prefixes.lookup(keys) != {}
    finally:
        await two.watch.close()
        await other.close()


async def test_last_index_stays_through_an_outage_and_a_store_that_comes_back_empty(
    store: EmbeddedStore, remote: BlockIndex, follow: Follow
) -> None:
    agent = await Agent(remote, "a").replace()
    await agent.write(GPU, 1, 2, 3)
    followed = follow(remote)
    await followed.join("a")
    await until(lambda: followed.equals(agent), "it is loaded")
    assert followed.mirror.age() < 60
    store.kill()
    await until(lambda: followed.mirror.problem, "the outage was noticed")
    fresh = followed.mirror.fresh_at
    assert followed.equals(agent)
    store.start()
    await until(lambda: not followed.mirror.problem, "it is followed again")
    assert followed.mirror.fresh_at > fresh
    assert followed.equals(agent), "the store forgot, the worker did not"
    await agent.replace()
    await agent.write(0, 2)
    await agent.write(GPU, 9)
    await until(lambda: followed.equals(agent), "it equals the truth again")


async def test_store_that_stands_still_makes_the_index_age_and_nothing_else(
    store: EmbeddedStore, remote: BlockIndex, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_watch, "READ_DEADLINE_S", 0.3)
    agent = await Agent(remote, "a").replace()
    await agent.write(GPU, 1)
    followed = follow(remote)
    await followed.join("a")
    await until(lambda: followed.equals(agent), "it is loaded")
    store.pause()
    try:
        await until(lambda: followed.mirror.problem, "the silence was noticed")
        assert followed.equals(agent)
    finally:
        store.resume()
    await agent.write(GPU, 2)
    await until(lambda: followed.equals(agent) and not followed.mirror.problem, "it is followed again")
