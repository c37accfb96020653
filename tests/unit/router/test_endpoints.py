from __future__ import annotations

import json
from dataclasses import replace

import pytest
from aiohttp import web

from tests.unit.router.conftest import LONG, PD, SPEC, StartCluster, StartWorker, until
from vllm_pd.state import Role

BODY = {"prompt": LONG, "max_tokens": 9}


async def test_health_is_200_without_any_worker_and_ready_says_what_is_missing(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    assert await cluster.get("/health") == (200, b"")
    await until(lambda: cluster.service.directory.store.up, "the store was asked")
    code, answer = await cluster.get("/ready")
    assert code == 503
    assert json.loads(answer) == {
        "ready": False,
        "reason": "No worker is alive; start one with `vllm serve MODEL --kv-connector pd --role both --pd-store URL`.",
        "store": {"configured": True, "up": True, "problem": None},
        "workers": [],
    }


async def test_ready_lists_workers_with_role_lease_and_load(pd: PD) -> None:
    await pd.cluster.load(pd.decode, running=2, waiting=1, kv_usage=0.5)
    code, answer = await pd.cluster.get("/ready")
    assert code == 200
    value = json.loads(answer)
    assert value["ready"] is True
    entry = next(worker for worker in value["workers"] if worker["id"] == pd.decode.host_port)
    assert 0 < entry.pop("lease_left_ms") <= 60_000
    assert entry == {
        "id": pd.decode.host_port,
        "url": pd.decode.url,
        "role": "decode",
        "moving_to": None,
        "pool": SPEC.id,
        "models": ["m"],
        "source": "store",
        "usable": True,
        "trouble": None,
        "load": {"inflight": 0, "running": 2, "waiting": 1, "kv_usage": 0.5},
    }


async def test_models_of_all_pools_are_merged_as_the_workers_tell_them(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster()
    one, two = await start_worker(models=("m", "adapter")), await start_worker(models=("other",))
    await cluster.join(one, Role.BOTH, models=("m",))
    await cluster.join(two, Role.BOTH, spec=replace(SPEC, model="other"))
    code, answer = await cluster.get("/v1/models")
    value = json.loads(answer)
    assert (code, value["object"]) == (200, "list")
    assert {model["id"] for model in value["data"]} == {"m", "adapter", "other"}
    await one.stop()
    data = json.loads((await cluster.get("/v1/models"))[1])["data"]
    from_memory = next(model for model in data if model["id"] == "m")
    assert (from_memory["object"], from_memory["max_model_len"]) == ("model", 2048)


@pytest.mark.parametrize(
    "answer", [b"\xff", b"[]", b'{"data":null}', b'{"data":[1]}', b'{"data":[{}]}', b'{"data":' + b"[" * 5000]
)
async def test_models_answer_that_is_nonsense_is_left_out(
    pd: PD, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(pd.decode, "_get", lambda _: web.Response(body=answer))
    code, body = await pd.cluster.get("/v1/models")
    assert code == 200
    assert [model["id"] for model in json.loads(body)["data"]] in ([], ["m"])


async def test_models_are_read_whatever_encodings_the_client_takes(pd: PD, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(request: web.Request) -> web.StreamResponse:
        reply = web.json_response({"data": [{"id": "adapter"}]})
        reply.enable_compression()
        return reply

    monkeypatch.setattr(pd.decode, "_get", get)
    code, body = await pd.cluster.get("/v1/models", headers={"Accept-Encoding": "gzip", "Range": "bytes=0-1"})
    assert (code, json.loads(body)["data"]) == (200, [{"id": "adapter"}])


async def test_metrics_page_counts_what_happened(pd: PD) -> None:
    await pd.cluster.post("/v1/completions", BODY)
    await pd.cluster.post("/v1/completions", {**BODY, "n": 2})
    page = (await pd.cluster.get("/metrics"))[1].decode()
    for line in (
        'vllm_pd_router_requests_total{endpoint="/v1/completions",status="200"} 2.0',
        "vllm_pd_router_split_total 1.0",
        'vllm_pd_router_bypass_total{reason="n"} 1.0',
        'vllm_pd_router_bypass_total{reason="echo"} 0.0',
        "vllm_pd_router_prefill_leg_seconds_count 1.0",
        "vllm_pd_router_proxy_overhead_seconds_count 2.0",
        'vllm_pd_router_ttft_seconds_count{mode="split"} 1.0',
        'vllm_pd_router_request_seconds_count{endpoint="/v1/completions"} 2.0',
        'vllm_pd_router_workers{role="decode"} 1.0',
        'vllm_pd_router_workers{role="both"} 0.0',
        f'vllm_pd_router_inflight_requests{{worker="{pd.decode.host_port}"}} 0.0',
        "vllm_pd_router_store_up 1.0",
    ):
        assert line in page.splitlines(), line


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/load_lora_adapter",
        "/sleep",
        "/reset_prefix_cache",
        "/start_profile",
        "/collective_rpc",
        "/v1/completions/",
        "//v1/completions",
        "/v1/x/../completions",
    ],
)
async def test_only_listed_paths_reach_a_worker(pd: PD, path: str) -> None:
    code, answer = await pd.cluster.post(path, BODY)
    if path != "/v1/x/../completions":  # the client itself resolves the dots
        assert code == 404
        assert "/v1/chat/completions" in json.loads(answer)["error"]["message"]
        assert pd.decode.seen == pd.prefill.seen == []


async def test_wrong_method_names_the_right_one(pd: PD) -> None:
    assert (await pd.cluster.get("/v1/completions"))[0] == 405
    async with pd.cluster.client.post(pd.cluster.url + "/health") as reply:
        assert (reply.status, reply.headers["Allow"]) == (405, "GET")
    async with pd.cluster.client.head(pd.cluster.url + "/health") as reply:
        assert reply.status == 200


async def test_router_with_a_key_asks_for_it_where_it_matters(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(api_key="outer", worker_api_key="inner")
    worker = await start_worker(api_key="inner")
    await cluster.join(worker, Role.BOTH)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "outer"}):
        code, answer = await cluster.post("/v1/completions", BODY, headers=headers)
        assert code == 401
        assert "Authorization: Bearer" in json.loads(answer)["error"]["message"]
        assert (await cluster.get("/v1/models", headers=headers))[0] == 401
    assert worker.seen == []
    right = {"Authorization": "bearer outer"}
    assert (await cluster.post("/v1/completions", BODY, headers=right))[0] == 200
    assert worker.posts[0].header("Authorization") == "Bearer inner"
    assert json.loads((await cluster.get("/v1/models", headers=right))[1])["data"][0]["id"] == "m"
    for path in ("/health", "/ready", "/metrics"):
        assert (await cluster.get(path))[0] == 200


async def test_clients_own_key_reaches_the_worker_when_the_router_has_none(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster()
    worker = await start_worker(api_key="theirs")
    await cluster.join(worker, Role.BOTH)
    assert (await cluster.post("/v1/completions", BODY))[0] == 401
    assert (await cluster.post("/v1/completions", BODY, headers={"Authorization": "Bearer theirs"}))[0] == 200
