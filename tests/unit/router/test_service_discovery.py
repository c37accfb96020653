"""Prometheus learns from the router which workers there are."""

from __future__ import annotations

import json

from tests.unit.router.conftest import PD, SPEC, StartCluster, StartWorker, until
from vllm_pd.state import Role


async def test_workers_are_listed_as_targets_whatever_their_role(pd: PD) -> None:
    code, body = await pd.cluster.get("/v1/sd")
    groups = {group["labels"]["worker"]: group for group in json.loads(body)}
    assert code == 200
    assert sorted(groups) == sorted([pd.prefill.host_port, pd.decode.host_port])
    assert groups[pd.decode.host_port] == {
        "targets": [pd.decode.host_port],
        "labels": {
            "__scheme__": "http",
            "__metrics_path__": "/metrics",
            "worker": pd.decode.host_port,
            "pool": SPEC.id,
            "model": "m",
        },
    }


async def test_prometheus_accepts_the_type_of_the_answer(pd: PD) -> None:
    async with pd.cluster.client.get(f"{pd.cluster.url}/v1/sd") as answer:
        assert answer.headers["Content-Type"] == "application/json"


async def test_a_worker_behind_tls_and_a_path_is_scraped_there(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster, worker = await start_cluster(), await start_worker()
    await cluster.join(worker, Role.BOTH, url=f"https://{worker.host_port}/a")
    ((group),) = json.loads((await cluster.get("/v1/sd"))[1])
    assert (group["labels"]["__scheme__"], group["labels"]["__metrics_path__"]) == ("https", "/a/metrics")
    assert group["targets"] == [worker.host_port]


async def test_the_router_that_cannot_know_yet_does_not_say_that_there_are_none(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    await until(lambda: cluster.service.directory.store.up, "the store was asked")
    assert await cluster.get("/v1/sd") == (200, b"[]")
    cluster.service.directory.store_down("does not answer")
    code, body = await cluster.get("/v1/sd")
    # The store watch may have come by meanwhile.
    assert (code == 503 and b"does not answer" in body) or body == b"[]"


async def test_the_list_is_for_those_who_have_the_routers_key(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(api_key="secret")
    await until(lambda: cluster.service.directory.store.up, "the store was asked")
    assert (await cluster.get("/v1/sd"))[0] == 401
    assert (await cluster.get("/v1/sd", headers={"Authorization": "Bearer secret"}))[0] == 200


async def test_roles_and_troubles_of_each_worker_are_metrics(pd: PD) -> None:
    id = pd.decode.host_port
    assert pd.cluster.metric("worker_info", worker=id, role="decode", pool=SPEC.id, model="m") == 1
    assert pd.cluster.metric("worker_usable", worker=id) == 1
    directory = pd.cluster.service.directory
    (worker,) = [worker for worker in directory.workers if worker.id == id]
    directory.note_down(worker, "silent")
    assert pd.cluster.metric("worker_usable", worker=id) == 0
