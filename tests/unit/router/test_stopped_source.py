"""A prefill worker that is stopped while a decode worker reads from it: the read may hang as long as the stop lasts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.unit.router.conftest import Cluster, StartCluster, StartWorker, until
from tests.unit.router.fake_worker import TRANSFER, FakeWorker, Hook, Seen
from tests.unit.router.test_health import SOON, SPLIT, known, stop
from vllm_pd.router.aiohttp_client import AiohttpResponse
from vllm_pd.router.transport import SourceDown, Wait
from vllm_pd.state import Role

SILENT_S = 3.0
"""Longer than what a busy machine keeps a worker that is well from answering."""

STREAM = json.dumps({**json.loads(SPLIT), "stream": True}).encode()


async def start(
    start_cluster: StartCluster, start_worker: StartWorker, decoders: int, **settings: Any
) -> tuple[Cluster, FakeWorker, list[FakeWorker]]:
    """A prefill worker and some decode workers, the first of which reads until it is told to `go on`."""
    cluster = await start_cluster(policy="least-loaded", **{"health_timeout": SOON, **settings})
    prefill, *decode = [await start_worker() for _ in range(1 + decoders)]
    await cluster.join(prefill, Role.PREFILL)
    for worker in decode:
        await cluster.join(worker, Role.DECODE)
    for worker in decode[1:]:
        await cluster.load(worker, running=9)
    return cluster, prefill, decode


def reading(worker: FakeWorker, done: asyncio.Event) -> Hook:
    """A worker whose reads are over when `done` is set."""

    async def hook(request: web.Request, seen: Seen) -> web.StreamResponse:
        if "kv_transfer_params" in seen.json:
            await done.wait()
        return await worker.answer(request, seen)

    return hook


@pytest.mark.parametrize("body", [SPLIT, STREAM], ids=["whole", "stream"])
async def test_what_reads_from_a_stopped_worker_is_computed_by_another(
    start_cluster: StartCluster, start_worker: StartWorker, body: bytes
) -> None:
    cluster, prefill, (first, second) = await start(start_cluster, start_worker, 2)
    first.hook = reading(first, asyncio.Event())
    asking = asyncio.create_task(cluster.post("/v1/completions", body))
    await first.arrived.wait()
    stop(prefill)
    assert (await asking)[0] == 200
    assert first.posts[0].json["kv_transfer_params"] == TRANSFER
    assert "kv_transfer_params" not in second.posts[0].json
    assert (len(first.posts), len(second.posts)) == (1, 1)
    await until(first.posts[0].cancelled.is_set, "the connection to the one that reads was closed")
    assert cluster.metric("legs_ended_total", reason="source_down") == 1
    assert cluster.metric("decode_retry_total", reason="source_down") == 1
    assert known(cluster, prefill).is_broken
    assert not known(cluster, first).is_broken
    assert cluster.inflight() == 0
    # It was not its fault.
    assert (await cluster.post("/v1/completions", body))[0] == 200
    assert len(first.posts) == 2


async def test_the_only_decode_worker_gets_it_again_as_a_new_request(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, prefill, (decode,) = await start(start_cluster, start_worker, 1)
    decode.hook = reading(decode, asyncio.Event())
    asking = asyncio.create_task(cluster.post("/v1/completions", SPLIT))
    await decode.arrived.wait()
    stop(prefill)
    assert (await asking)[0] == 200
    assert [seen.json.get("kv_transfer_params") for seen in decode.posts] == [TRANSFER, None]
    assert decode.posts[1].raw == SPLIT
    assert cluster.inflight() == 0


async def test_a_read_from_one_that_is_known_to_be_stopped_ends_at_once(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, prefill, (decode,) = await start(start_cluster, start_worker, 1, health_timeout=60.0)
    decode.hook = reading(decode, asyncio.Event())
    asking = asyncio.create_task(cluster.post("/v1/completions", SPLIT))
    await decode.arrived.wait()
    stop(prefill)
    cluster.service.directory.note_down(known(cluster, prefill), "stopped")
    assert (await asking)[0] == 200
    assert "kv_transfer_params" not in decode.posts[1].json


async def test_a_long_answer_is_waited_for_as_long_as_the_prefill_worker_lives(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, prefill, (first, second) = await start(start_cluster, start_worker, 2)
    done = asyncio.Event()
    first.hook = reading(first, done)
    asking = asyncio.create_task(cluster.post("/v1/completions", SPLIT))
    await first.arrived.wait()
    # It has nothing else to say than that it lives. What else it computes does not matter.
    await cluster.load(prefill, running=1)
    await asyncio.sleep(5 * SOON)
    assert not known(cluster, prefill).is_broken
    done.set()
    assert (await asking)[0] == 200
    assert (len(first.posts), len(second.posts)) == (1, 0)


async def test_a_prefill_worker_whose_engine_is_stuck_can_still_be_read_from(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, prefill, (decode,) = await start(start_cluster, start_worker, 1, down_timeout=SOON)
    done = asyncio.Event()
    decode.hook = reading(decode, done)
    asking = asyncio.create_task(cluster.post("/v1/completions", SPLIT))
    await decode.arrived.wait()
    cluster.service.directory.note_stuck(known(cluster, prefill), "no step")
    await asyncio.sleep(4 * SOON)
    done.set()
    assert (await asking)[0] == 200
    assert len(decode.posts) == 1


async def test_beyond_the_retry_budget_the_read_is_waited_for_and_nobody_gets_an_error(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, prefill, (decode,) = await start(
        start_cluster, start_worker, 1, retry_ratio=0.0, retry_floor=0.0, down_timeout=SILENT_S
    )
    done = asyncio.Event()
    decode.hook = reading(decode, done)
    asking = asyncio.create_task(cluster.post("/v1/completions", SPLIT))
    await decode.arrived.wait()
    stop(prefill)
    await until(lambda: known(cluster, prefill).is_broken, "it was found down")
    await asyncio.sleep(3 * SOON)
    done.set()
    assert (await asking)[0] == 200
    assert len(decode.posts) == 1


async def test_a_stream_that_has_begun_does_not_need_the_prefill_worker_any_more(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, prefill, (decode,) = await start(start_cluster, start_worker, 1)
    decode.gate = asyncio.Event()
    async with cluster.client.post(cluster.url + "/v1/completions", data=STREAM) as reply:
        assert await reply.content.readany() == b'data: {"n":1}\n\n'
        stop(prefill)
        cluster.service.directory.note_down(known(cluster, prefill), "stopped")
        await asyncio.sleep(3 * SOON)
        decode.gate.set()
        assert (await reply.content.read()).endswith(b"data: [DONE]\n\n")
    assert len(decode.posts) == 1


async def test_an_answer_that_begins_just_as_it_is_given_up_is_not_half_sent(
    start_cluster: StartCluster, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, _, (first, second) = await start(start_cluster, start_worker, 2)
    ended: list[Wait] = []
    next_chunk = AiohttpResponse.next_chunk

    async def chunk_then_end(self: AiohttpResponse, idle: float) -> bytes:
        chunk = await next_chunk(self, idle)
        if not ended:
            ended.append(self._wait)
            self._wait.end(SourceDown("p gives no sign of life"))
        return chunk

    monkeypatch.setattr(AiohttpResponse, "next_chunk", chunk_then_end)
    first.gate = asyncio.Event()
    code, answer = await cluster.post("/v1/completions", STREAM)
    assert (code, answer) == (200, b'data: {"n":1}\n\ndata: {"n":2}\n\ndata: [DONE]\n\n')
    assert (len(first.posts), len(second.posts)) == (1, 1)
