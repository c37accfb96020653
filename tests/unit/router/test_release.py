"""Blocks that nobody will read are let go: one request at a time to each engine, which takes all keys that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from tests.unit.router.conftest import StartWorker, record, until
from tests.unit.router.fake_worker import FakeWorker, Seen, cut, hang, status
from vllm_pd.holds import MAX_KEYS, RELEASE_FIELD, new_key
from vllm_pd.router import engine_messages
from vllm_pd.router.aiohttp_client import AiohttpUpstream
from vllm_pd.router.directory import Directory
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.release import Hold, Releases
from vllm_pd.state import Role


class Sender:
    """Releases over real connections, and what they counted."""

    def __init__(self, worker_key: str = "") -> None:
        self.metrics = RouterMetrics(Directory(lambda: 0.0, store_configured=False, router="r"))
        self.upstream = AiohttpUpstream(connect_timeout=2.0)
        self.releases = Releases(self.upstream, self.metrics, worker_key=worker_key)

    def counted(self, outcome: str) -> float:
        name = "vllm_pd_router_released_handoffs_total"
        return self.metrics.registry.get_sample_value(name, {"outcome": outcome}) or 0.0

    async def close(self) -> None:
        await self.releases.close()
        await self.upstream.close()


@pytest.fixture
async def sender() -> AsyncIterator[Sender]:
    made = Sender()
    yield made
    await made.close()


@pytest.fixture
async def worker(start_worker: StartWorker) -> FakeWorker:
    return await start_worker()


def hold(worker: FakeWorker, key: str, *, rank: int | None = None, authorization: str = "", **changes: Any) -> Hold:
    return Hold(record(worker, Role.PREFILL, **changes), key, rank, authorization)


def keys_of(seen: Seen) -> list[str]:
    listed: list[str] = seen.json["kv_transfer_params"][RELEASE_FIELD]
    return listed


async def test_a_release_is_a_request_for_one_token_that_names_the_hold(sender: Sender, worker: FakeWorker) -> None:
    sender.releases.release(hold(worker, "k"))
    await until(lambda: sender.counted("released") == 1, "the release was counted")
    (seen,) = worker.posts
    assert seen.path == "/v1/completions"
    assert seen.json == {"model": "m", "prompt": [0], "max_tokens": 1, "kv_transfer_params": {RELEASE_FIELD: ["k"]}}


async def test_while_one_is_under_way_others_gather_for_the_next(sender: Sender, worker: FakeWorker) -> None:
    gate = asyncio.Event()

    async def wait(request: web.Request, seen: Seen) -> web.StreamResponse:
        await gate.wait()
        return await worker.answer(request, seen)

    worker.hook = wait
    sender.releases.release(hold(worker, "first"))
    await until(lambda: worker.posts, "the first was sent")
    many = [f"key {n}" for n in range(MAX_KEYS + 1)]
    for key in many:
        sender.releases.release(hold(worker, key))
    gate.set()
    await until(lambda: sender.counted("released") == 2 + MAX_KEYS, "all were let go")
    assert [keys_of(seen) for seen in worker.posts] == [["first"], many[:MAX_KEYS], many[MAX_KEYS:]]


async def test_every_worker_has_its_own_turn(sender: Sender, start_worker: StartWorker) -> None:
    """One that hangs keeps nobody's else's blocks."""
    hanging, other = await start_worker(), await start_worker()
    hanging.hook = hang
    sender.releases.release(hold(hanging, "a"))
    sender.releases.release(hold(other, "b"))
    await until(lambda: sender.counted("released") == 1, "the other's was let go")
    assert keys_of(other.posts[0]) == ["b"]


@pytest.mark.parametrize(("rank", "asked"), [(1, ["1"]), (None, ["0", "1", "2"])])
async def test_the_engine_that_holds_them_is_asked_or_all(
    sender: Sender, worker: FakeWorker, rank: int | None, asked: list[str]
) -> None:
    sender.releases.release(hold(worker, "k", rank=rank, dp_size=3))
    await until(lambda: sender.counted("released") == len(asked), "the release was counted")
    assert sorted(str(seen.header("X-data-parallel-rank")) for seen in worker.posts) == asked


async def test_the_workers_key_goes_before_the_clients(start_worker: StartWorker) -> None:
    for worker_key, wanted in (("own", "Bearer own"), ("", "Bearer client")):
        worker, sender = await start_worker(), Sender(worker_key)
        sender.releases.release(hold(worker, "k", authorization="Bearer client"))
        await until(lambda s=sender: s.counted("released") == 1, "the release was counted")
        assert worker.posts[0].header("Authorization") == wanted
        await sender.close()


async def test_what_a_worker_does_not_take_is_left_to_its_lease(
    sender: Sender, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_messages, "DEADLINE_S", 0.2)
    for count, hook in enumerate((status(401), cut, hang), start=1):
        worker.hook = hook
        sender.releases.release(hold(worker, f"k{count}"))
        await until(lambda n=count: sender.counted("left_to_lease") == n, "the failure was counted")
    gone = replace(hold(worker, "k"), record=record(worker, Role.PREFILL, url="http://127.0.0.1:9"))
    sender.releases.release(gone)
    await until(lambda: sender.counted("left_to_lease") == 4, "the refused connection was counted")
    worker.hook = None
    sender.releases.release(hold(worker, "later"))
    await until(lambda: sender.counted("released") == 1, "a worker that is back is asked again")


async def test_the_waiting_room_of_a_worker_that_hangs_is_bounded(
    sender: Sender, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_messages, "MAX_WAITING", 2)
    worker.hook = hang
    sender.releases.release(hold(worker, "sent"))
    await until(lambda: worker.posts, "the first was sent")
    for n in range(5):
        sender.releases.release(hold(worker, f"k{n}"))
    assert sender.counted("left_to_lease") == 3
    monkeypatch.setattr(engine_messages, "LAST_S", 0.01)
    await sender.releases.close()
    await until(lambda: worker.posts[0].cancelled.is_set(), "the request ended with the router")
    assert sender.counted("left_to_lease") == 6


async def test_what_is_under_way_when_the_router_stops_gets_there(sender: Sender, worker: FakeWorker) -> None:
    sender.releases.release(hold(worker, "last"))
    await sender.releases.close()
    assert sender.counted("released") == 1


def test_keys_cannot_be_guessed() -> None:
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert all(len(key) == 32 for key in keys)


def test_a_clients_key_is_in_no_text(worker: FakeWorker) -> None:
    shown = hold(worker, new_key(), authorization="Bearer secret")
    assert "secret" not in repr(shown)
