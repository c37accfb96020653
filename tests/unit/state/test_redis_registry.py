"""What only a real server can show: failures, keys, slots, foreign data and secrets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import pytest
import redis

from tests.conformance.registry import FILES, LEASE_MS, OTHER_POOL, POOL, live, worker
from vllm_pd.errors import SettingsError, StoreError
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state import Epoch, HeartbeatResult, RouterWork, WorkerId, WorkerLoad, scripts
from vllm_pd.state.keys import Keys
from vllm_pd.state.redis_registry import RedisRegistry

KEYS = Keys("test")
T = TypeVar("T")


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@pytest.fixture
async def registry(store: EmbeddedStore) -> AsyncIterator[RedisRegistry]:
    registry = RedisRegistry(store.url, "test", timeout_s=5.0)
    yield registry
    await registry.close()


@pytest.fixture
def client(store: EmbeddedStore) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(store.url) as client:
        yield client


async def until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """The answer of a call whose deadline is too short for a busy machine to keep it every time."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return await call()
        except StoreError:
            assert time.monotonic() < deadline


async def test_a_killed_store_is_an_error_and_is_used_again_when_back(
    store: EmbeddedStore, registry: RedisRegistry
) -> None:
    await registry.heartbeat(worker(), LEASE_MS)
    store.kill()
    for _ in range(3):
        with pytest.raises(StoreError, match=f"redis://127.0.0.1:{store.port} cannot be used"):
            await registry.snapshot()
    store.start()
    assert await live(registry) == []
    assert await registry.heartbeat(worker(), LEASE_MS) is HeartbeatResult.NEW


async def test_a_restart_while_idle_is_not_noticed(store: EmbeddedStore, registry: RedisRegistry) -> None:
    await registry.heartbeat(worker(), LEASE_MS)
    store.kill()
    store.start()
    # One turn of the loop is enough to see that the idle connection was closed.
    await asyncio.sleep(0.05)
    assert await registry.heartbeat(worker(), LEASE_MS) is HeartbeatResult.NEW


async def test_every_call_on_a_silent_store_ends_by_its_deadline(store: EmbeddedStore) -> None:
    registry = RedisRegistry(store.url, "test", timeout_s=0.1, bulk_timeout_s=0.2)
    await until_answered(lambda: registry.heartbeat(worker(), LEASE_MS))
    store.pause()
    calls = {
        "heartbeat": lambda: registry.heartbeat(worker(), LEASE_MS),
        "publish_inflight": lambda: registry.publish_inflight("r", POOL.id, {}, LEASE_MS),
        "publish_load": lambda: registry.publish_load(WorkerId("a:1"), POOL.id, 0, {}, LEASE_MS),
        "withdraw": lambda: registry.withdraw(WorkerId("a:1"), POOL.id, Epoch(1)),
        "snapshot": registry.snapshot,
        "put_tokenizer": lambda: registry.put_tokenizer(POOL.id, FILES, LEASE_MS),
        "get_tokenizer": lambda: registry.get_tokenizer(POOL.id, FILES.sha),
    }
    # Each once with the connection that was open and once with a new one, which a paused server still accepts.
    for call in [*calls.values(), *calls.values()]:
        with pytest.raises(StoreError, match="did not answer within"):
            await call()
    await registry.close()
    store.resume()
    again = RedisRegistry(store.url, "test", timeout_s=5.0)
    assert await live(again) == [worker()]
    await again.close()


async def test_a_late_answer_is_never_taken_for_the_next_one(store: EmbeddedStore) -> None:
    registry = RedisRegistry(store.url, "test", timeout_s=0.2)
    await until_answered(lambda: registry.heartbeat(worker(), LEASE_MS))
    store.pause()
    with pytest.raises(StoreError):
        await registry.snapshot()
    store.resume()
    assert await until_answered(lambda: registry.heartbeat(worker(), LEASE_MS)) is HeartbeatResult.RENEWED
    assert await until_answered(lambda: live(registry)) == [worker()]
    await registry.close()


async def test_a_cancelled_call_leaves_the_registry_usable(registry: RedisRegistry, store: EmbeddedStore) -> None:
    await registry.heartbeat(worker(), LEASE_MS)
    store.pause()
    call = asyncio.create_task(registry.snapshot())
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    store.resume()
    assert await live(registry) == [worker()]


async def test_passwords_stay_out_of_messages() -> None:
    with EmbeddedStore(password="s3cret") as store:
        good = RedisRegistry(store.url, "test", timeout_s=5.0)
        assert await live(good) == []
        await good.close()
        for wrong in ("wr0ng", ""):
            bad = RedisRegistry(f"redis://:{wrong}@127.0.0.1:{store.port}", "test", timeout_s=5.0)
            with pytest.raises(StoreError, match="refused the user or password") as error:
                await bad.snapshot()
            await bad.close()
            assert "wr0ng" not in str(error.value)
        queried = RedisRegistry(f"redis://127.0.0.1:{store.port}?password=wr0ng", "test", timeout_s=5.0)
        with pytest.raises(StoreError) as error:
            await queried.snapshot()
        await queried.close()
        assert "wr0ng" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://:p/ss@h:1", "malformed"),
        ("redis://u:pass@h:port", "malformed"),
        ("redis://u:pass@h?no_such_option=1", "option that is unknown"),
        ("http://u:pass@h", "must begin with"),
    ],
)
def test_a_malformed_url_is_refused_without_its_secret(url: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as error:
        RedisRegistry(url, "test")
    assert "p/ss" not in str(error.value)
    assert "pass@" not in str(error.value)
    assert error.value.__cause__ is None


async def test_a_full_store_says_what_to_change(client: redis.Redis, registry: RedisRegistry) -> None:
    client.config_set("maxmemory", "1")
    with pytest.raises(StoreError, match="raise its maxmemory"):
        await registry.heartbeat(worker(), LEASE_MS)


async def test_a_replica_says_what_to_change(client: redis.Redis, registry: RedisRegistry) -> None:
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    client.config_set("replica-read-only", "yes")
    with pytest.raises(StoreError, match="primary"):
        await registry.heartbeat(worker(), LEASE_MS)


async def test_a_replica_is_read_even_when_a_worker_has_just_expired(
    client: redis.Redis, registry: RedisRegistry
) -> None:
    await registry.heartbeat(worker("live:1"), LEASE_MS)
    client.zadd(KEYS.workers(POOL.id), {"dead:1": 1})
    client.config_set("replica-serve-stale-data", "yes")
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    assert await live(registry) == [worker("live:1")]


async def test_a_full_store_still_lets_workers_go(client: redis.Redis, registry: RedisRegistry) -> None:
    await registry.heartbeat(worker(), LEASE_MS)
    client.config_set("maxmemory", "1")
    assert await live(registry) == [worker()]
    assert await registry.withdraw(worker().id, POOL.id, worker().epoch)
    assert await live(registry) == []


async def test_a_record_of_another_program_gives_way(client: redis.Redis, registry: RedisRegistry) -> None:
    client.hset(KEYS.worker(POOL.id, worker().id), "epoch", "yesterday")
    assert await registry.heartbeat(worker(), LEASE_MS) is HeartbeatResult.NEW
    assert await live(registry) == [worker()]


async def test_a_key_of_another_type_says_what_to_change(client: redis.Redis, registry: RedisRegistry) -> None:
    client.set(KEYS.worker(POOL.id, worker().id), "a string")
    with pytest.raises(StoreError, match="--pd-namespace"):
        await registry.heartbeat(worker(), LEASE_MS)


async def test_foreign_data_costs_only_itself_and_is_said_once(
    client: redis.Redis, registry: RedisRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = worker("good:1"), [worker(f"bad:{i}") for i in range(5)]
    for record in [good, *bad, worker("other:1", pool=OTHER_POOL)]:
        await registry.heartbeat(record, LEASE_MS)
        await registry.publish_load(record.id, record.pool.id, 0, {0: WorkerLoad(1, 0, 0.0, 1)}, LEASE_MS)
    client.hset(KEYS.worker(POOL.id, bad[0].id), "record", b"\xff not a record")
    client.hset(KEYS.worker(POOL.id, bad[1].id), "record", client.hget(KEYS.worker(POOL.id, good.id), "record"))
    client.delete(KEYS.worker(POOL.id, bad[2].id))
    client.set(KEYS.worker(POOL.id, bad[2].id), "a string")
    client.delete(KEYS.load(POOL.id, bad[3].id))
    client.set(KEYS.load(POOL.id, bad[3].id), "a string")
    client.hset(KEYS.load(POOL.id, bad[4].id), "1", b"not a load")
    client.zadd(KEYS.workers(POOL.id), {b"\xff\xfe": 1e15})
    client.zadd(KEYS.pools, {"not a pool": 1e15})
    client.delete(KEYS.workers(OTHER_POOL.id))
    client.set(KEYS.workers(OTHER_POOL.id), "a string")
    client.hset(KEYS.inflight(POOL.id), mapping={"r1": b"1e15:not work", b"\xff": b"999999999999999:\x80"})
    for _ in range(3):
        states = (await registry.snapshot()).workers
        assert [(s.record.id, s.running) for s in states] == [("bad:3", 0), ("bad:4", 1), ("good:1", 1)]
    assert registry.malformed_total == 3 * 9
    assert len([r for r in caplog.records if "cannot be read" in r.message]) == 1


async def test_an_evicted_record_hides_the_worker_until_its_next_heartbeat(
    client: redis.Redis, registry: RedisRegistry
) -> None:
    await registry.heartbeat(worker(), LEASE_MS)
    client.delete(KEYS.worker(POOL.id, worker().id))
    assert await live(registry) == []
    assert await registry.heartbeat(worker(), LEASE_MS) is HeartbeatResult.NEW
    assert await live(registry) == [worker()]
    assert registry.malformed_total == 0


async def test_tokenizer_files_that_were_tampered_with_are_not_returned(
    client: redis.Redis, registry: RedisRegistry
) -> None:
    sha = await registry.put_tokenizer(POOL.id, FILES, LEASE_MS)
    key = KEYS.tokenizer(POOL.id, sha)
    client.set(key, client.get(key).replace(b"messages", b"mess4ges"))
    assert await registry.get_tokenizer(POOL.id, sha) is None
    client.set(key, b"\xc1")
    assert await registry.get_tokenizer(POOL.id, sha) is None


async def test_every_key_ends_by_itself(client: redis.Redis, registry: RedisRegistry) -> None:
    await registry.heartbeat(worker(), LEASE_MS)
    await registry.publish_load(worker().id, POOL.id, 0, {0: WorkerLoad(1, 0, 0.0, 1)}, LEASE_MS)
    await registry.publish_inflight("r", POOL.id, {worker().id: RouterWork(1, 1)}, LEASE_MS)
    await registry.put_tokenizer(POOL.id, FILES, LEASE_MS)
    keys = client.keys("*")
    assert len(keys) == 6
    assert all(0 < client.pttl(key) <= LEASE_MS for key in keys)


async def test_expired_members_are_removed_by_whoever_comes_by(client: redis.Redis, registry: RedisRegistry) -> None:
    await registry.heartbeat(worker("live:1"), LEASE_MS)
    client.zadd(KEYS.workers(POOL.id), {f"dead:{i}": 1 for i in range(100)})
    client.zadd(KEYS.pools, {f"{i:016x}": 1 for i in range(100)})
    for _ in range(2):
        assert await live(registry) == [worker("live:1")]
    assert client.zcard(KEYS.workers(POOL.id)) == client.zcard(KEYS.pools) == 1


async def test_writers_that_fell_silent_leave_no_field_behind(client: redis.Redis, registry: RedisRegistry) -> None:
    client.hset(KEYS.inflight(POOL.id), mapping={f"dead-{n}": b"5:\x80" for n in range(50)})
    await registry.publish_inflight("live", POOL.id, {}, LEASE_MS)
    assert client.hkeys(KEYS.inflight(POOL.id)) == [b"live"]


async def test_snapshots_take_three_round_trips_however_many_workers(
    client: redis.Redis, registry: RedisRegistry
) -> None:
    async def reads() -> int:
        before = client.info("stats")["total_reads_processed"]
        await registry.snapshot()
        # The INFO calls are read by the server too.
        return int(client.info("stats")["total_reads_processed"]) - before - 1

    for i in range(40):
        await registry.heartbeat(worker(f"w:{i:02}", pool=POOL if i % 2 else OTHER_POOL), LEASE_MS)
    await registry.snapshot()
    assert await reads() <= 3


async def test_a_clock_that_differs_between_hosts_does_not_matter(
    registry: RedisRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    await registry.heartbeat(worker(), LEASE_MS)
    (state,) = (await registry.snapshot()).workers
    assert 0 < state.lease_left_ms <= LEASE_MS


def test_the_keys_of_a_script_share_a_slot() -> None:
    from redis.crc import key_slot

    id = worker("[::1]:8000").id
    pool_keys = [KEYS.workers(POOL.id), KEYS.worker(POOL.id, id), KEYS.load(POOL.id, id), KEYS.tokenizer(POOL.id, "0")]
    pool_keys.append(KEYS.inflight(POOL.id))
    assert len({key_slot(key.encode()) for key in pool_keys}) == 1
    assert all(f"KEYS[{n}]" in scripts.HEARTBEAT.text for n in (1, 2, 3))
    assert all("KEYS[2]" not in script.text for script in (scripts.LIVE, scripts.TOUCH_POOL, scripts.PUBLISH))
