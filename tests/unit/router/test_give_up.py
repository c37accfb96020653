"""A decode leg ends before its first byte: its worker is told that nobody wants the hand-off any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from tests.unit.router.conftest import LONG, PD, Cluster, StartCluster, StartWorker, until
from tests.unit.router.fake_worker import ANSWER, TRANSFER, FakeWorker, Hook, Seen, cut, hang, status
from vllm_pd.given_up import GIVE_UP_FIELD, LEASE_END_FIELD
from vllm_pd.router import engine_messages
from vllm_pd.state import Role

BODY = {"prompt": LONG, "max_tokens": 20}
LEASE_END = 1_900_000_000_000
NAMED = {
    "remote_engine_id": "engine-p", "remote_request_id": "cmpl-x", "remote_host": "127.0.0.1", "remote_port": 5600,
    LEASE_END_FIELD: LEASE_END, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
}  # fmt: skip


async def leased(_: web.Request, __: Seen) -> web.StreamResponse:
    """A prefill worker that says until when its blocks may be read."""
    return web.json_response({**ANSWER, "kv_transfer_params": {**TRANSFER, LEASE_END_FIELD: LEASE_END}})


def told(worker: FakeWorker) -> list[Seen]:
    """What it was told to give up."""
    return [seen for seen in worker.posts if GIVE_UP_FIELD in (seen.json.get("kv_transfer_params") or {})]


def legs(worker: FakeWorker) -> list[Seen]:
    return [seen for seen in worker.posts if "do_remote_prefill" in (seen.json.get("kv_transfer_params") or {})]


def after(hook: Hook, worker: FakeWorker) -> Hook:
    """`hook` for decode legs, the ordinary answer to whatever else."""

    async def choose(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await (hook if seen in legs(worker) else worker.answer)(request, seen)

    return choose


async def started(start_cluster: StartCluster, start_worker: StartWorker, **decode: Any) -> PD:
    cluster = await start_cluster()
    prefill, decoder = await start_worker(), await start_worker()
    prefill.hook = leased
    await cluster.join(prefill, Role.PREFILL)
    await cluster.join(decoder, Role.DECODE, **{"engine_id": "engine-d", **decode})
    return PD(cluster, prefill, decoder)


@pytest.fixture
async def both(start_cluster: StartCluster, start_worker: StartWorker) -> PD:
    return await started(start_cluster, start_worker)


def counted(cluster: Cluster, outcome: str) -> float:
    return cluster.metric("given_up_handoffs_total", outcome=outcome)


async def leave(pd: PD, **options: Any) -> None:
    """A client that leaves when the decode worker has its leg."""
    pd.decode.hook = after(hang, pd.decode)
    request = asyncio.create_task(pd.cluster.post("/v1/completions", BODY, **options))
    await until(lambda: legs(pd.decode), "the decode leg was sent")
    request.cancel()
    await until(legs(pd.decode)[0].cancelled.is_set, "the leg is given up")


async def test_client_that_leaves_has_its_hand_off_given_up(both: PD) -> None:
    await leave(both)
    await until(lambda: counted(both.cluster, "delivered") == 1, "the decode worker was told")
    (seen,) = told(both.decode)
    assert seen.path == "/v1/completions"
    assert seen.json == {
        "model": "m",
        "prompt": [0],
        "max_tokens": 1,
        "kv_transfer_params": {GIVE_UP_FIELD: {"engine": "engine-d", "handoffs": [NAMED]}},
    }
    assert len(both.prefill.posts) == 1, "only the decode worker knows whether it reads the blocks"


@pytest.mark.parametrize("hook", [cut, status(400), status(500), status(503)])
async def test_leg_that_fails_before_its_first_byte_has_its_hand_off_given_up(both: PD, hook: Hook) -> None:
    both.decode.hook = after(hook, both.decode)
    await both.cluster.post("/v1/completions", BODY)
    await until(lambda: counted(both.cluster, "delivered") == 1, "the decode worker was told")
    assert len(told(both.decode)) == 1


async def test_leg_that_has_begun_needs_no_word(both: PD) -> None:
    """Neither one that ends normally nor one whose client leaves then: the blocks have been read."""
    assert (await both.cluster.post("/v1/completions", BODY))[0] == 200
    both.decode.gate = asyncio.Event()
    async with both.cluster.client.post(f"{both.cluster.url}/v1/completions", json={**BODY, "stream": True}) as answer:
        await answer.content.readany()
    await until(lambda: len(legs(both.decode)) == 2 and legs(both.decode)[1].cancelled.is_set(), "it is given up")
    assert not told(both.decode)


async def test_request_that_was_not_split_needs_no_word(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster, decoder = await start_cluster(), await start_worker()
    await cluster.join(decoder, Role.DECODE, engine_id="engine-d")
    decoder.hook = cut
    await cluster.post("/v1/completions", BODY)
    assert not told(decoder)


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("rank", [None, "1"])
async def test_engine_of_several_is_told_by_its_own_name(
    start_cluster: StartCluster, start_worker: StartWorker, rank: str | None, first: int
) -> None:
    """vLLM names engines by their rank among all servers of a model, and requests by that among those of one server."""
    pd = await started(start_cluster, start_worker, dp_size=2, first_rank=first)
    await leave(pd, headers={"X-data-parallel-rank": rank} if rank else {})
    await until(lambda: counted(pd.cluster, "delivered") == 1, "the decode worker was told")
    (seen,), (leg,) = told(pd.decode), legs(pd.decode)
    asked = leg.header("X-data-parallel-rank")
    assert asked is not None and rank in (None, asked)
    assert seen.header("X-data-parallel-rank") == asked
    assert seen.json["kv_transfer_params"][GIVE_UP_FIELD]["engine"] == f"engine-d_dp{first + int(asked)}"


@pytest.mark.parametrize(
    ("changes", "lease", "why"),
    [({"engine_id": ""}, True, "unknown_engine"), ({}, False, "no_lease")],
)
async def test_hand_off_that_cannot_be_named_is_left_to_its_lease(
    start_cluster: StartCluster, start_worker: StartWorker, changes: dict[str, Any], lease: bool, why: str
) -> None:
    pd = await started(start_cluster, start_worker, **changes)
    pd.prefill.hook = leased if lease else None
    await leave(pd)
    await until(lambda: counted(pd.cluster, why) == 1, "it was counted")
    assert not told(pd.decode)


async def test_worker_that_is_gone_may_be_reading_all_the_same(both: PD) -> None:
    """Its API server takes no connections; of its engine that says nothing."""

    async def die(request: web.Request, seen: Seen) -> web.StreamResponse:
        asyncio.get_running_loop().call_soon(lambda: dying.append(asyncio.create_task(both.decode.stop())))
        return await cut(request, seen)

    dying: list[asyncio.Task[None]] = []
    both.decode.hook = die
    await both.cluster.post("/v1/completions", BODY)
    await until(
        lambda: counted(both.cluster, "unreachable") + counted(both.cluster, "no_answer") == 1, "it was counted"
    )
    assert len(both.prefill.posts) == 1
    await asyncio.gather(*dying)


async def test_worker_that_does_not_answer_is_not_waited_for(both: PD, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_messages, "DEADLINE_S", 0.1)
    both.decode.hook = hang
    request = asyncio.create_task(both.cluster.post("/v1/completions", BODY))
    await until(lambda: legs(both.decode), "the decode leg was sent")
    request.cancel()
    await until(lambda: counted(both.cluster, "no_answer") == 1, "it was counted")
