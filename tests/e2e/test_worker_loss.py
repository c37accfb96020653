"""Workers and the store die under a real cluster: what the router says, and that requests still end well.

The cluster is that of the whole run. The last test leaves its prefill worker dead: no file comes after this one.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from functools import partial
from typing import Any

import pytest

from tests.e2e import prompts, wait
from tests.e2e.ask import Endpoint, Prompt
from tests.e2e.conftest import BLOCK, LEASE_S, MODEL
from vllm_pd.graph.local import LocalCluster, LocalWorker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SOON_S = 60.0
eventually = partial(wait.eventually, seconds=SOON_S)
PREFILL_LEG = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def question(name: str) -> Prompt:
    return Prompt(name, "completion", {"prompt": f"{name}: {prompts.TEXTS['english'] * 3}"})


def ready(cluster: LocalCluster) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{cluster.router_url}/ready", timeout=SOON_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def listed(cluster: LocalCluster) -> set[str]:
    return {worker["url"] for worker in ready(cluster)[1]["workers"]}


def computed(worker: LocalWorker) -> float:
    return worker.metrics().value("vllm:prompt_tokens_by_source_total", source="local_compute")


def bypassed(cluster: LocalCluster, reason: str) -> float:
    return cluster.router_metrics().value("vllm_pd_router_bypass_total", reason=reason)


@pytest.fixture
def router(cluster: LocalCluster) -> Endpoint:
    return Endpoint(cluster.router_url, MODEL)


def test_a_killed_prefill_worker_leaves_within_its_lease_and_serves_again_after_a_restart(
    cluster: LocalCluster, router: Endpoint
) -> None:
    prefill, decode = cluster.worker("prefill-0"), cluster.worker("decode-0")
    assert eventually(lambda: listed(cluster) == {prefill.url, decode.url})
    wanted = router.ask(question("before")).text

    prefill.process.kill()
    assert router.ask(question("before")).text == wanted, "nobody noticed the death yet, and the answer still comes"
    assert eventually(lambda: listed(cluster) == {decode.url}, seconds=LEASE_S + SOON_S)
    before = bypassed(cluster, "no_prefill_worker")
    assert len(router.ask(question("meanwhile")).steps) == 12
    assert bypassed(cluster, "no_prefill_worker") == before + 1

    cluster.restart(prefill)
    assert eventually(lambda: listed(cluster) == {prefill.url, decode.url})
    assert router.ask(question("before")).text == wanted
    # A prompt that the decode worker has not computed meanwhile.
    assert len(router.ask(question("afterwards")).steps) == 12
    assert computed(prefill) > BLOCK


@pytest.mark.slow
def test_without_a_decode_worker_the_router_says_so_and_recovers(cluster: LocalCluster, router: Endpoint) -> None:
    prefill, decode = cluster.worker("prefill-0"), cluster.worker("decode-0")
    wanted = router.ask(question("decode")).text
    decode.process.kill()
    assert eventually(lambda: ready(cluster)[0] == 503, seconds=LEASE_S + SOON_S)
    status, page = ready(cluster)
    assert status == 503 and "decode" in page["reason"]
    assert eventually(lambda: listed(cluster) == {prefill.url})
    with pytest.raises(urllib.error.HTTPError) as refused:
        router.ask(question("nobody"))
    assert refused.value.code == 503
    assert "decode" in json.load(refused.value)["error"]["message"]

    cluster.restart(decode)
    assert eventually(lambda: ready(cluster)[0] == 200)
    assert router.ask(question("decode")).text == wanted


def test_blocks_are_not_read_after_the_lease(cluster: LocalCluster) -> None:
    decode = Endpoint(cluster.worker("decode-0").url, MODEL)
    body = {"model": MODEL, "prompt": prompts.TEXTS["german"] * 3, "temperature": 0, "max_tokens": 8}
    leg = Endpoint(cluster.worker("prefill-0").url, MODEL).post(
        "/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": PREFILL_LEG}
    )
    late = {**leg["kv_transfer_params"], "pd_lease_until_ms": int(time.time() * 1000) - 1}
    before = cluster.worker("decode-0").metrics().value("vllm:nixl_bytes_transferred_sum")
    got = decode.post("/v1/completions", {**body, "kv_transfer_params": late})
    assert cluster.worker("decode-0").metrics().value("vllm:nixl_bytes_transferred_sum") == before
    assert got["choices"][0]["text"] == decode.post("/v1/completions", body)["choices"][0]["text"]


def test_the_store_dies_and_comes_back_empty_while_requests_go_on(cluster: LocalCluster, router: Endpoint) -> None:
    assert cluster.store is not None
    wanted = router.ask(question("store")).text
    cluster.store.kill()
    assert eventually(lambda: not ready(cluster)[1]["store"]["up"])
    deadline = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < deadline:
        assert router.ask(question("store")).text == wanted
    assert ready(cluster)[0] == 200
    cluster.store.start()
    assert eventually(lambda: ready(cluster)[1]["store"]["up"])
    everybody = {worker.url for worker in cluster.workers if worker.role is not None}
    assert eventually(lambda: listed(cluster) == everybody)
    assert router.ask(question("store")).text == wanted


def test_a_prompt_whose_prefill_worker_died_before_the_hand_off_is_computed_by_the_decode_worker(
    cluster: LocalCluster,
) -> None:
    prefill, decode = cluster.worker("prefill-0"), cluster.worker("decode-0")
    body = {"model": MODEL, "prompt": prompts.TEXTS["french"] * 3, "temperature": 0, "max_tokens": 8}
    leg = Endpoint(prefill.url, MODEL).post(
        "/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": PREFILL_LEG}
    )
    prefill.process.kill()
    direct = Endpoint(decode.url, MODEL)
    handed = direct.post("/v1/completions", {**body, "kv_transfer_params": leg["kv_transfer_params"]})
    assert handed["choices"][0]["finish_reason"] == "length"
    assert handed["choices"][0]["text"] == direct.post("/v1/completions", body)["choices"][0]["text"]
