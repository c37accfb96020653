"""Workers that schedule by priority are told which request goes first; the others get the client's own bytes."""

from __future__ import annotations

import json
import time

import pytest

from tests.unit.router.conftest import LONG, Cluster, StartCluster, StartWorker
from tests.unit.router.fake_worker import FakeWorker
from vllm_pd.router.legs import PRIORITY_STEP
from vllm_pd.state import Role

PATH = "/v1/completions"
BODY = json.dumps({"model": "m", "prompt": "short", "max_tokens": 3}).encode()


async def joined(
    start_cluster: StartCluster, start_worker: StartWorker, *, by_priority: bool, **settings: object
) -> tuple[Cluster, FakeWorker]:
    cluster, worker = await start_cluster(**settings), await start_worker()
    await cluster.join(worker, Role.BOTH, by_priority=by_priority)
    return cluster, worker


async def test_priority_is_the_turn_in_milliseconds(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster, worker = await joined(start_cluster, start_worker, by_priority=True)
    before = time.time() * 1000
    status, _ = await cluster.post(PATH, BODY)
    assert status == 200
    (seen,) = worker.posts
    assert seen.raw.startswith(BODY[:-1])
    assert before - 1 <= seen.json["priority"] <= time.time() * 1000 + 60_000


async def test_another_policy_by_header_keeps_its_place_among_the_others(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, worker = await joined(start_cluster, start_worker, by_priority=True)
    before = time.time() * 1000
    await cluster.post(PATH, BODY, headers={"x-vllm-pd-policy": "round-robin"})
    assert before - 1 <= worker.posts[0].json["priority"] <= time.time() * 1000


@pytest.mark.parametrize("settings", [{"weights": (("patience", 0.0),)}, {"policy": "round-robin"}])
async def test_without_patience_the_order_of_arrival_is_left_to_the_engine(
    start_cluster: StartCluster, start_worker: StartWorker, settings: dict[str, object]
) -> None:
    cluster, worker = await joined(start_cluster, start_worker, by_priority=True, **settings)
    await cluster.post(PATH, BODY)
    assert worker.posts[0].raw == BODY


@pytest.mark.parametrize("body", [b"{}", b'{"model": 1}', b"no JSON"])
async def test_what_has_no_prompt_is_passed_on_as_it_is(
    start_cluster: StartCluster, start_worker: StartWorker, body: bytes
) -> None:
    cluster, worker = await joined(start_cluster, start_worker, by_priority=True)
    await cluster.post(PATH, body)
    assert worker.posts[0].raw == body


async def test_other_workers_get_the_clients_bytes(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster, worker = await joined(start_cluster, start_worker, by_priority=False)
    await cluster.post(PATH, BODY)
    assert worker.posts[0].raw == BODY


async def test_clients_priority_ranks_before_the_turn(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster, worker = await joined(start_cluster, start_worker, by_priority=True)
    for priority in (0, 5, -5):
        await cluster.post(PATH, {"model": "m", "prompt": "short", "priority": priority})
    usual, late, early = (seen.json["priority"] for seen in worker.posts)
    assert early < 0 < usual < late


async def test_header_by_which_clients_name_a_priority_ranks_before_the_body(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, worker = await joined(start_cluster, start_worker, by_priority=True)
    request = {"model": "m", "prompt": "short", "priority": -5}
    for value in ("7", "high"):
        await cluster.post(PATH, request, headers={"X-Vllm-Priority": value})
    by_header, by_body = worker.posts
    assert by_header.json["priority"] > 7 * PRIORITY_STEP
    # vLLM would take it once more.
    assert by_header.header("X-Vllm-Priority") is None
    assert by_body.json["priority"] < 0


async def test_endpoints_without_a_prompt_have_no_priority(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, worker = await joined(start_cluster, start_worker, by_priority=True)
    body = b'{"model": "m", "input": "text"}'
    await cluster.post("/v1/embeddings", body)
    assert worker.posts[0].raw == body


async def test_prompt_of_a_split_request_has_its_turn_and_its_decode_leg_waits_for_nobody(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, first, second = await start_cluster(), await start_worker(), await start_worker()
    await cluster.join(first, Role.PREFILL, by_priority=True)
    await cluster.join(second, Role.DECODE, by_priority=True)
    await cluster.post(PATH, {"model": "m", "prompt": LONG, "max_tokens": 20})
    assert first.posts[0].json["priority"] > 0
    assert "priority" not in second.posts[0].json
