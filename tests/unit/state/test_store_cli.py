"""`vllm-pd store` on a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator

import pytest
import redis

from tests.conformance.block_index import GPU, TTL_MS, packed
from tests.conformance.registry import LEASE_MS, POOL, worker
from vllm_pd.cli import main
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state import Holder, WorkerId
from vllm_pd.state.keys import Keys, cache_name
from vllm_pd.state.redis_block_index import RedisBlockIndex
from vllm_pd.state.redis_registry import RedisRegistry

RECORD = dataclasses.replace(worker("a:1"), dp_size=1)
HOLDER = Holder(RECORD.id)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        monkeypatch.setenv("VLLM_PD_STORE", store.url)
        yield store


def fill(store: EmbeddedStore, *, announced: bool = True) -> None:
    """One live worker with 3,000 blocks, and one that is gone."""

    async def run() -> None:
        registry = RedisRegistry(store.url, "default", timeout_s=10.0)
        index = RedisBlockIndex(store.url, "default", timeout_s=10.0)
        await registry.heartbeat(RECORD, LEASE_MS)
        if announced:
            await index.writer(POOL.id, HOLDER, RECORD.epoch, TTL_MS).replace({GPU: packed(range(3000))})
        gone = Holder(WorkerId("gone:1"))
        await index.writer(POOL.id, gone, RECORD.epoch, TTL_MS).replace({GPU | 4: packed([1])})
        await registry.close()
        await index.close()

    asyncio.run(run())


def test_stats_show_what_every_cache_holds_and_costs(store: EmbeddedStore, capsys: pytest.CaptureFixture[str]) -> None:
    fill(store)
    assert main(["store", "stats", "--json"]) == 0
    (pool,) = json.loads(capsys.readouterr().out)
    assert (pool["pool"], pool["model"], pool["workers"]) == (POOL.id, "tiny", ["a:1"])
    alive, gone = pool["caches"]
    assert (alive["worker"], alive["distinct"], alive["blocks"]) == ("a:1", 3000, {"gpu": 3000, "cpu": 0, "ssd": 0})
    assert 16 * 3000 < alive["bytes"] < 30 * 3000
    assert (gone["worker"], gone["blocks"]) == ("gone:1", {"gpu": 1, "cpu": 0, "ssd": 1})
    assert pool["stream"]["entries"] > 2
    assert main(["store", "stats"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"pool {POOL.id} tiny: 1 live workers, 2 caches, 3001 blocks" in lines[0]
    assert lines[2].split()[:7] == ["a:1", "0", "yes", "3000", "0", "0", "3000"]
    assert lines[3].split()[:7] == ["gone:1", "0", "no", "1", "0", "1", "1"]


def test_check_says_what_is_wrong_by_its_exit_code(store: EmbeddedStore, capsys: pytest.CaptureFixture[str]) -> None:
    fill(store)
    assert main(["store", "check"]) == 0
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()[1:]] == ["equal", "orphan"]
    with redis.Redis.from_url(store.url) as client:
        client.setrange(Keys("default").slab(POOL.id, cache_name(HOLDER, RECORD.epoch), 1, 0), 0, b"\x00")
    assert main(["store", "check", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)
    assert [check["verdict"] for check in checks] == ["differs", "orphan"]
    assert (checks[0]["stated"]["gpu"], checks[0]["found"]["gpu"]) == (3000, 2999)
    assert main(["store", "check"]) == 1
    assert "vllm-pd store clear --yes" in capsys.readouterr().err


def test_check_misses_the_cache_of_a_live_worker(store: EmbeddedStore, capsys: pytest.CaptureFixture[str]) -> None:
    fill(store, announced=False)
    assert main(["store", "check"]) == 1
    assert "no cache in the index" in capsys.readouterr().err


def test_clear_wants_to_be_sure_and_keeps_the_workers(store: EmbeddedStore, capsys: pytest.CaptureFixture[str]) -> None:
    fill(store)
    assert main(["store", "clear"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert main(["store", "clear", "--yes", "--pool", "0" * 16]) == 0
    assert "removed 0 keys" in capsys.readouterr().out
    assert main(["store", "clear", "--yes"]) == 0
    with redis.Redis.from_url(store.url) as client:
        assert not [name for name in client.keys("*") if b":cache" in name or b":blocks:" in name]
    assert main(["workers"]) == 0


def test_what_cannot_be_done_is_said(store: EmbeddedStore, capsys: pytest.CaptureFixture[str]) -> None:
    for action in (["stats"], ["check"], ["clear", "--yes"]):
        assert main(["store", *action]) == 1
        assert "No worker is registered" in capsys.readouterr().err
    assert main(["store", "stats", "--namespace", "a:b"]) == 2
    store.kill()
    assert main(["store", "check"]) == 1
    assert "cannot be used" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["store", "stats", "--pool", "x"])


def test_a_store_must_be_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("VLLM_PD_STORE", raising=False)
    assert main(["store", "stats"]) == 2
    assert "No store is given" in capsys.readouterr().err
