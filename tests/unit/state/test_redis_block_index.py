"""What only a real server can show of the block index: failures, memory, commands and foreign data."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from tests.conformance.block_index import (
    CPU,
    EPOCH,
    GPU,
    HOLDER,
    POOL,
    TTL_MS,
    Mirror,
    begun,
    entries,
    grouped,
    held,
    key,
    packed,
    whatever,
)
from vllm_pd.errors import IndexLost, StoreError
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state import START, BlockWriter, Epoch, Packed
from vllm_pd.state.block_codec import SLAB_BYTES
from vllm_pd.state.keys import Keys, cache_name
from vllm_pd.state.redis_block_index import RedisBlockIndex

KEYS = Keys("test")
NAME = cache_name(HOLDER, EPOCH)
CACHE = KEYS.cache(POOL, NAME)


def slab(number: int, generation: int = 1) -> str:
    return KEYS.slab(POOL, NAME, generation, number)


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@pytest.fixture
async def index(store: EmbeddedStore) -> AsyncIterator[RedisBlockIndex]:
    index = RedisBlockIndex(store.url, "test", timeout_s=5.0)
    yield index
    await index.close()


@pytest.fixture
def client(store: EmbeddedStore) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(store.url) as client:
        yield client


async def announce(writer: BlockWriter, blocks: dict[int, Packed]) -> None:
    """Replace, for as long as the machine is too busy to keep a short deadline."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return await writer.replace(blocks)
        except StoreError:
            assert time.monotonic() < deadline


async def test_a_killed_store_is_an_error_and_is_filled_again_when_back(
    store: EmbeddedStore, index: RedisBlockIndex
) -> None:
    writer = await begun(index, {GPU: packed(range(10))})
    tail = await index.tail(POOL)
    store.kill()
    with pytest.raises(StoreError, match="cannot be used"):
        await writer.write({GPU: packed([20])})
    with pytest.raises(StoreError, match="cannot be used"):
        await writer.replace({GPU: packed([20])})
    with pytest.raises(StoreError, match="cannot be used"):
        await index.read(POOL, tail, wait_ms=100)
    store.start()
    await writer.replace({GPU: packed([20])})
    assert await held(index) == {key(20): GPU}


async def test_calls_on_a_silent_store_end_and_their_late_arrival_changes_nothing(store: EmbeddedStore) -> None:
    index = RedisBlockIndex(store.url, "test", timeout_s=0.1)
    writer = index.writer(POOL, HOLDER, EPOCH, TTL_MS)
    await announce(writer, {GPU: packed(range(10))})
    tail = await index.tail(POOL)
    store.pause()
    for call in (
        lambda: writer.write({GPU: packed([99])}),
        lambda: writer.replace({GPU: packed([98])}),
        lambda: index.read(POOL, tail, wait_ms=100),
        lambda: index.held(POOL, HOLDER, EPOCH),
        lambda: index.stats(POOL),
        lambda: index.clear(POOL),
        writer.remove,
    ):
        with pytest.raises(StoreError, match="did not answer within"):
            await call()
    store.resume()
    mirror = Mirror(index)
    await announce(writer, {CPU: packed([1])})
    # What was sent while the store was silent has been executed by now, in whatever order.
    await asyncio.sleep(0.1)
    try:
        await writer.renew(TTL_MS)
    except StoreError:
        await announce(writer, {CPU: packed([1])})
    patient = RedisBlockIndex(store.url, "test", timeout_s=5.0)
    mirror = Mirror(patient)
    await mirror.catch_up()
    assert await held(patient) == mirror.blocks == {key(1): CPU}
    await index.close()
    await patient.close()


async def test_a_cancelled_write_is_followed_by_a_replacement(store: EmbeddedStore, index: RedisBlockIndex) -> None:
    writer = await begun(index, {GPU: packed(range(10))})
    store.pause()
    call = asyncio.create_task(writer.write({GPU: packed([99])}))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    store.resume()
    with pytest.raises(IndexLost):
        await writer.write({GPU: packed([98])})
    await writer.replace({GPU: packed([1])})
    assert await held(index) == {key(1): GPU}


async def test_no_change_has_the_number_of_one_that_a_failed_over_store_forgot(
    store: EmbeddedStore, client: redis.Redis, index: RedisBlockIndex
) -> None:
    """Its readers have seen it, and would take the later one for the one that they know."""
    hasty = RedisBlockIndex(store.url, "test", timeout_s=0.5)
    writer = hasty.writer(POOL, HOLDER, EPOCH, TTL_MS)
    await announce(writer, {GPU: packed(range(10))})
    replica = client.hgetall(CACHE)
    store.pause()
    with pytest.raises(StoreError):
        await writer.write({GPU: packed([99])})
    store.resume()
    async with asyncio.timeout(30):
        while client.hget(CACHE, "seq") == replica[b"seq"]:  # noqa: ASYNC110 (nobody says when the server is there)
            await asyncio.sleep(0.01)
    client.hset(CACHE, mapping=replica)
    await announce(writer, {GPU: packed([1])})
    numbers = [entry.change.seq for entry in await entries(index)]
    assert numbers == sorted(set(numbers))
    await hasty.close()


async def test_an_evicted_key_is_noticed_by_the_next_write_there_or_the_renewal(
    client: redis.Redis, index: RedisBlockIndex
) -> None:
    blocks = {GPU: packed(range(5000))}
    for lost in (CACHE, None):
        writer = await begun(index, blocks)
        generation = int(client.hget(CACHE, "gen"))
        assert client.delete(lost or slab(0, generation)) == 1
        with pytest.raises(IndexLost):
            await writer.write({0: packed(range(5000))})
        await writer.replace(blocks)
        assert len(await held(index) or {}) == 5000
    writer = index.writer(POOL, HOLDER, EPOCH, 40)
    await writer.replace(blocks)
    assert client.delete(slab(1, int(client.hget(CACHE, "gen")))) == 1
    found = await index.held(POOL, HOLDER, EPOCH)
    assert found is not None
    assert sum(map(len, found.blocks.values())) < len(blocks[GPU])
    with pytest.raises(IndexLost):
        await writer.renew(TTL_MS)


async def test_a_slab_that_was_left_behind_is_made_anew(client: redis.Redis, index: RedisBlockIndex) -> None:
    client.set(slab(0), b"\x01" * SLAB_BYTES)
    await begun(index, {GPU: packed([1])})
    assert await held(index) == {key(1): GPU}


async def test_every_key_ends_by_itself(client: redis.Redis, index: RedisBlockIndex) -> None:
    writer = await begun(index, {GPU: packed(range(5000))})
    await writer.renew(TTL_MS)
    names = client.keys("*")
    assert len(names) == 3 + 3
    assert all(TTL_MS <= client.pttl(name) <= 2 * TTL_MS for name in names)
    client.delete(KEYS.events(POOL))
    await writer.write({GPU: packed([1])})
    assert 0 < client.pttl(KEYS.events(POOL)) <= 2 * TTL_MS
    client.delete(KEYS.events(POOL))
    await writer.remove()
    assert [(name, client.pttl(name) > 0) for name in client.keys("*")] == [(KEYS.events(POOL).encode(), True)]


async def test_a_renewal_touches_only_what_would_end_soon(client: redis.Redis, index: RedisBlockIndex) -> None:
    writer = await begun(index, {GPU: packed(range(20_000))})
    client.config_resetstat()
    for _ in range(10):
        await writer.renew(TTL_MS)
    assert client.info("commandstats")["cmdstat_pexpire"]["calls"] <= 10 * 3
    await writer.renew(2 * TTL_MS + 1000)
    assert min(client.pttl(name) for name in client.keys("*blocks*")) > 2 * TTL_MS


async def test_an_earlier_start_leaves_no_keys(client: redis.Redis, index: RedisBlockIndex) -> None:
    await begun(index, {GPU: packed(range(5000))})
    newer = index.writer(POOL, HOLDER, Epoch(EPOCH + 1), TTL_MS)
    await newer.replace({})
    assert client.keys("*blocks*") == []
    assert client.zrange(KEYS.caches(POOL), 0, -1) == [cache_name(HOLDER, Epoch(EPOCH + 1)).encode()]


async def test_replacing_leaves_no_keys_of_before(client: redis.Redis, index: RedisBlockIndex) -> None:
    writer = await begun(index, {GPU: packed(range(5000))})
    for _ in range(3):
        await writer.replace({GPU: packed([1])})
    assert client.keys("*blocks*") == [slab(0, 4).encode()]


async def test_nobody_scans_the_store(client: redis.Redis, index: RedisBlockIndex) -> None:
    client.config_resetstat()
    writer = await begun(index, {GPU: packed(range(5000))})
    await writer.write({0: packed(range(100))})
    await writer.renew(TTL_MS)
    await index.read(POOL, START, wait_ms=1)
    await index.held(POOL, HOLDER, EPOCH)
    await index.stats(POOL)
    await writer.replace({})
    await writer.remove()
    await index.clear(POOL)
    used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert not used & {"scan", "keys", "hscan", "zscan", "flushdb", "flushall", "hgetall", "randomkey"}


async def test_memory_is_under_30_bytes_a_block_and_stays_flat(client: redis.Redis, index: RedisBlockIndex) -> None:
    count, chance = 10_000, random.Random(5)
    truth = dict.fromkeys(map(key, range(count)), GPU)
    writer = await begun(index, grouped(truth))
    before = (await index.stats(POOL)).caches[0]
    assert before.memory_bytes < 30 * count
    fresh = count
    for _ in range(40):
        gone = chance.sample(sorted(truth), 500)
        new = list(map(key, range(fresh, fresh + 500)))
        fresh += 500
        for name in gone:
            del truth[name]
        truth.update(dict.fromkeys(new, GPU))
        await writer.write({0: b"".join(gone), GPU: b"".join(new)})
    after = (await index.stats(POOL)).caches[0]
    assert (after.distinct, after.keys, after.memory_bytes) == (count, before.keys, before.memory_bytes)
    assert await held(index) == truth


async def test_the_stream_is_bounded_and_says_so_to_slow_readers(
    client: redis.Redis, index: RedisBlockIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_pd.state.redis_block_writer.STREAM_ENTRIES", 20)
    writer = await begun(index)
    tail = await index.tail(POOL)
    chance, truth = random.Random(1), dict[bytes, int]()
    slow = Mirror(index)
    await slow.start()
    for _ in range(400):
        await writer.write(whatever(truth, chance, 20))
    # Redis drops whole nodes of up to 100 entries.
    assert client.xlen(KEYS.events(POOL)) < 150
    with pytest.raises(IndexLost):
        await index.read(POOL, tail, wait_ms=0, limit=10)
    await slow.catch_up(limit=10)
    assert (slow.blocks, slow.gaps) == (truth, 0)


async def test_what_is_no_entry_is_skipped_and_counted(
    client: redis.Redis, index: RedisBlockIndex, caplog: pytest.LogCaptureFixture
) -> None:
    writer = await begun(index, {GPU: packed([1])})
    client.xadd(KEYS.events(POOL), {"c": b"\xc1"})
    client.xadd(KEYS.events(POOL), {"other": b"1"})
    await writer.write({GPU: packed([2])})
    assert [entry.change.seq for entry in await entries(index)] == [1, 2, 3]
    assert index.malformed_total == 2
    assert "cannot be read" in caplog.text


async def test_foreign_values_under_our_names_cost_only_themselves(client: redis.Redis, index: RedisBlockIndex) -> None:
    await begun(index, {GPU: packed(range(5000))})
    client.set(slab(0), b"short")
    client.delete(slab(1))
    client.hset(slab(1), "a", "b")
    client.zadd(KEYS.caches(POOL), {b"\xff": 1e15, "no name": 1e15, "a:1:0:7": 1e15})
    client.hset(KEYS.cache(POOL, "a:1:0:7"), mapping={"gen": "x", "seq": "y", "slabs": "z", "digests": "?"})
    found = await index.held(POOL, HOLDER, EPOCH)
    assert found is not None
    assert len(unpacked_keys(found.blocks)) == 5000 - 2 * 2040
    assert [cache.holder for cache in (await index.stats(POOL)).caches] == [HOLDER]
    assert index.malformed_total == 3
    writer = await begun(index, {GPU: packed([1])})
    await writer.renew(TTL_MS)
    assert await held(index) == {key(1): GPU}
    assert await index.clear(POOL) >= 4
    assert [name for name in client.keys("*") if b"blocks" not in name] == []


def unpacked_keys(blocks: dict[int, Packed]) -> set[bytes]:
    return {data[at : at + 15] for data in blocks.values() for at in range(0, len(data), 15)}


async def test_a_hash_of_another_program_gives_way(client: redis.Redis, index: RedisBlockIndex) -> None:
    client.hset(CACHE, mapping={"seq": "yesterday", "gen": "one"})
    await begun(index, {GPU: packed([1])})
    assert await held(index) == {key(1): GPU}


async def test_a_key_of_another_type_says_what_to_change(client: redis.Redis, index: RedisBlockIndex) -> None:
    client.set(CACHE, "a string")
    with pytest.raises(StoreError, match="--pd-namespace"):
        await begun(index)


async def test_a_full_store_says_what_to_change_and_lets_caches_go(client: redis.Redis, index: RedisBlockIndex) -> None:
    writer = await begun(index, {GPU: packed(range(10))})
    client.config_set("maxmemory", "1")
    with pytest.raises(StoreError, match="raise its maxmemory"):
        await writer.write({GPU: packed([20])})
    await writer.remove()
    assert await index.held(POOL, HOLDER, EPOCH) is None


async def test_statistics_do_without_the_right_to_ask_for_memory(
    client: redis.Redis, store: EmbeddedStore, index: RedisBlockIndex
) -> None:
    await begun(index, {GPU: packed(range(10))})
    client.execute_command("ACL", "SETUSER", "small", "on", ">pw", "~{pd:*", "+@all", "-memory")
    limited = RedisBlockIndex(f"redis://small:pw@127.0.0.1:{store.port}", "test", timeout_s=5.0)
    (cache,) = (await limited.stats(POOL)).caches
    assert (cache.distinct, cache.memory_bytes) == (10, 0)
    await limited.close()


def test_the_keys_of_a_pool_share_a_slot() -> None:
    from redis.crc import key_slot

    names = [KEYS.caches(POOL), CACHE, slab(0), slab(77, 3), KEYS.events(POOL), KEYS.workers(POOL)]
    assert len({key_slot(name.encode()) for name in names}) == 1
