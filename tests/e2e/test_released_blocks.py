"""Clients leave in every phase of a hand-off between two real workers: blocks are free long before their lease ends.

Most tests are the router themselves, so that each phase is there when the client leaves. An engine that is to be caught
in a phase is stopped (SIGSTOP) while its API server runs on. Reads go over TCP, which needs both ends alive.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e import prompts, wait
from tests.e2e.ask import Endpoint
from tests.e2e.conftest import MODEL, WORKER_IN_ENGINE, tiny_cluster
from tests.e2e.test_worker_loss import PREFILL_LEG, computed
from vllm_pd.given_up import give_up_params, handoff_in
from vllm_pd.graph import proc_tree
from vllm_pd.graph.local import LocalCluster, LocalWorker
from vllm_pd.holds import HOLD_FIELD, RELEASE_FIELD
from vllm_pd.state import open_registry

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LEASE_S = 300.0
SOON_S = 60.0
"""Far below the lease: what is free by then was let go."""
eventually = partial(wait.eventually, seconds=SOON_S)
IDLE_S = 20.0
"""An idle engine has been seen to make a step after half a minute, whatever the reason."""
TRIES = 40
LATER_S = 0.01
"""By so much each try comes later: less than a prefill of several steps takes."""


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    env = {"VLLM_PD_LEASE_S": str(LEASE_S), "UCX_TLS": "tcp", **WORKER_IN_ENGINE}
    made = tiny_cluster(
        tiny_model, tmp_path_factory.mktemp("holds"), args=("--max-num-seqs", "2"), env=env,
        prefill=1, decode=1,
    )  # fmt: skip
    with made:
        yield made
    # A killed server cannot clean its shared memory; the launcher does, and says so.
    assert not made.left.processes and not made.left.ports


@pytest.fixture
def prefill(cluster: LocalCluster) -> LocalWorker:
    return cluster.worker("prefill-0")


@pytest.fixture
def decode(cluster: LocalCluster) -> Iterator[LocalWorker]:
    """With the prefill worker's and its own blocks free before and after each test."""
    worker = cluster.worker("decode-0")
    for each in cluster.workers:
        is_free(each)
    yield worker
    for each in cluster.workers:
        if each.process.is_running:
            is_free(each)


class Client:
    """One request whose client can leave."""

    def __init__(self, asked: LocalWorker | str, body: dict[str, Any]) -> None:
        url = asked if isinstance(asked, str) else asked.url
        self._connection = http.client.HTTPConnection(url.rpartition("/")[2], timeout=SOON_S)
        self._answer: http.client.HTTPResponse | None = None
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})

    def leave(self) -> None:
        if self._answer is not None:
            self._answer.close()
        self._connection.close()

    def first_bytes(self) -> bytes:
        self._answer = self._connection.getresponse()
        return self._answer.read1()

    def was_answered(self) -> bool:
        """Whether anything has come by now."""
        self._connection.sock.settimeout(0.0)
        try:
            return bool(self._connection.sock.recv(1))
        except BlockingIOError:
            return False


def usage(worker: LocalWorker) -> float:
    return worker.metrics().value("vllm:kv_cache_usage_perc")


def is_free(worker: LocalWorker, seconds: float = SOON_S) -> None:
    assert eventually(lambda: usage(worker) == 0, seconds=seconds), (
        f"{worker.name} still uses {usage(worker):.1%} of its blocks"
    )


def in_use(worker: LocalWorker) -> None:
    assert eventually(lambda: usage(worker) > 0), f"{worker.name} has taken no blocks"


def read_bytes(worker: LocalWorker) -> float:
    return worker.metrics().value("vllm:nixl_bytes_transferred_sum")


@contextmanager
def stopped(worker: LocalWorker, *, server: bool = False) -> Iterator[None]:
    """Its engine stands still within the block, and its API server goes on; or the other way round."""
    leader = proc_tree.identify(worker.process.pid)
    assert leader is not None
    which = {leader} if server else proc_tree.family(leader) - {leader}
    proc_tree.send(which, signal.SIGSTOP)
    try:
        yield
    finally:
        proc_tree.send(which, signal.SIGCONT)


def question(name: str) -> dict[str, Any]:
    text = f"{name}: {prompts.TEXTS['english'] * 12}"
    return {"model": MODEL, "prompt": text, "temperature": 0, "max_tokens": 8, "ignore_eos": True}


def leg(name: str) -> dict[str, Any]:
    """The prefill leg of a question, held under its name."""
    return {**question(name), "max_tokens": 1, "kv_transfer_params": {**PREFILL_LEG, HOLD_FIELD: name}}


def prefilled(worker: LocalWorker, name: str) -> dict[str, Any]:
    """The hand-off parameters of a question whose blocks are held now."""
    params: dict[str, Any] = Endpoint(worker.url, MODEL).post("/v1/completions", leg(name))["kv_transfer_params"]
    in_use(worker)
    return params


def release(worker: LocalWorker, *keys: str) -> None:
    body = {"model": MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {RELEASE_FIELD: list(keys)}}
    Endpoint(worker.url, MODEL).post("/v1/completions", body)


def give_up(cluster: LocalCluster, worker: LocalWorker, params: dict[str, Any]) -> None:
    """Tell a decode worker, as a router does, that a hand-off is not wanted any more."""

    async def engine_id() -> str:
        assert cluster.store is not None
        registry = open_registry(cluster.store.url, cluster.namespace, timeout_s=5.0)
        try:
            records = [state.record for state in (await registry.snapshot()).workers]
        finally:
            await registry.close()
        (found,) = (record.engine_id for record in records if record.url == worker.url)
        return found

    handoff = handoff_in(json.dumps(params).encode())
    assert handoff is not None
    told = json.loads(msgspec.json.encode(give_up_params(asyncio.run(engine_id()), [handoff])))
    body = {"model": MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": told}
    Endpoint(worker.url, MODEL).post("/v1/completions", body)


def answer(worker: LocalWorker, body: dict[str, Any]) -> str:
    text: str = Endpoint(worker.url, MODEL).post("/v1/completions", body)["choices"][0]["text"]
    return text


def test_refused_by_the_decode_worker(prefill: LocalWorker, decode: LocalWorker) -> None:
    """The two have not met before: a decode worker that does nothing else says so all the same."""
    params = prefilled(prefill, "refused")
    with pytest.raises(urllib.error.HTTPError):
        answer(decode, {**question("refused"), "max_tokens": 100_000, "kv_transfer_params": params})
    is_free(prefill, IDLE_S)


def test_queued_at_the_prefill_worker(prefill: LocalWorker, decode: LocalWorker) -> None:
    with stopped(prefill):
        client = Client(prefill, leg("queued"))
        time.sleep(0.5)
        client.leave()
    is_free(prefill)


def test_prefilling(prefill: LocalWorker, decode: LocalWorker) -> None:
    for n in range(TRIES):
        client = Client(prefill, leg(f"prefilling {n}"))
        # How long it takes to begin, and to end, is the machine's affair.
        time.sleep(n * LATER_S)
        with stopped(prefill):
            # For what its engine has sent to come to be known.
            time.sleep(0.3)
            caught = usage(prefill) > 0 and not client.was_answered()
            client.leave()
            time.sleep(0.2)
        release(prefill, f"prefilling {n}")
        is_free(prefill)
        if caught:
            return
    pytest.fail(f"none of {TRIES} prefills was caught between its first step and its last")


def test_held_at_the_prefill_worker(prefill: LocalWorker, decode: LocalWorker) -> None:
    for name in ("held", "kept"):
        prefilled(prefill, name)
    both = usage(prefill)
    release(prefill, "held", "unknown")
    assert eventually(lambda: 0 < usage(prefill) < both), "the other's blocks stay"
    release(prefill, "kept", "held")
    is_free(prefill)


def test_a_release_that_comes_first_counts(prefill: LocalWorker, decode: LocalWorker) -> None:
    release(prefill, "early")
    Endpoint(prefill.url, MODEL).post("/v1/completions", leg("early"))
    is_free(prefill)


def test_on_the_way_to_the_decode_engine(cluster: LocalCluster, prefill: LocalWorker, decode: LocalWorker) -> None:
    """Through the router. The decode worker's API server has the request and drops it: its engine never hears of it."""
    with stopped(decode, server=True):
        client = Client(cluster.router_url, question("on the way"))
        assert eventually(lambda: cluster.router_metrics().value("vllm_pd_router_prefill_leg_seconds_count") > 0)
        in_use(prefill)
        time.sleep(0.5)
        client.leave()
        time.sleep(0.5)
    is_free(prefill)
    assert eventually(
        lambda: cluster.router_metrics().value("vllm_pd_router_given_up_handoffs_total", outcome="delivered") > 0
    )


def test_given_up_before_it_came_to_the_decode_engine(
    cluster: LocalCluster, prefill: LocalWorker, decode: LocalWorker
) -> None:
    params = prefilled(prefill, "given up")
    give_up(cluster, decode, params)
    is_free(prefill, IDLE_S)
    before = read_bytes(decode)
    got = answer(decode, {**question("given up"), "kv_transfer_params": params})
    assert read_bytes(decode) == before, "others may have the blocks by now"
    assert got == answer(prefill, question("given up"))


def test_given_up_while_it_is_read(cluster: LocalCluster, prefill: LocalWorker, decode: LocalWorker) -> None:
    """The blocks stay until they have been read."""
    handed_over(prefill, decode, "known")
    wanted = answer(prefill, question("being read"))
    params = prefilled(prefill, "being read")
    before = read_bytes(decode)
    with ThreadPoolExecutor(1) as pool:
        with stopped(prefill):
            asked = pool.submit(answer, decode, {**question("being read"), "kv_transfer_params": params})
            in_use(decode)
            give_up(cluster, decode, params)
        assert asked.result(SOON_S) == wanted
    assert eventually(lambda: read_bytes(decode) > before)


def test_waiting_at_the_decode_worker(prefill: LocalWorker, decode: LocalWorker) -> None:
    running = [Client(decode, {**question(f"long {n}"), "max_tokens": 1200, "stream": True}) for n in range(2)]
    assert all(client.first_bytes() for client in running)
    params = prefilled(prefill, "waiting")
    client = Client(decode, {**question("waiting"), "kv_transfer_params": params})
    assert eventually(lambda: decode.metrics().value("vllm:num_requests_waiting") == 1)
    client.leave()
    is_free(prefill)
    assert decode.metrics().value("vllm:num_requests_running") == 2, "it waited until the client left"
    for client in running:
        client.leave()
    is_free(decode)


def test_transferring(prefill: LocalWorker, decode: LocalWorker) -> None:
    handed_over(prefill, decode, "they know each other")
    params = prefilled(prefill, "transferring")
    with stopped(prefill):
        client = Client(decode, {**question("transferring"), "kv_transfer_params": params})
        in_use(decode)
        client.leave()
        time.sleep(0.5)
    is_free(decode)
    is_free(prefill)


def test_decoding(prefill: LocalWorker, decode: LocalWorker) -> None:
    params = prefilled(prefill, "decoding")
    endless = {**question("decoding"), "max_tokens": 1000, "stream": True, "kv_transfer_params": params}
    client = Client(decode, endless)
    assert client.first_bytes()
    in_use(decode)
    client.leave()
    is_free(decode)
    is_free(prefill)


def handed_over(prefill: LocalWorker, decode: LocalWorker, name: str) -> None:
    """One question through both, read and not computed by the second."""
    before = read_bytes(decode)
    params = prefilled(prefill, name)
    read = answer(decode, {**question(name), "kv_transfer_params": params})
    assert eventually(lambda: read_bytes(decode) > before)
    assert read == answer(prefill, question(name))


def until_in_s(params: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The same hand-off with so much left of its lease, and no heartbeat that extends it."""
    return {**params, "pd_lease_until_ms": int((time.time() + seconds) * 1000), "pd_lease_extension_ms": 0}


def test_a_read_that_outlasts_its_lease_is_computed(prefill: LocalWorker, decode: LocalWorker) -> None:
    """The prefill worker is stopped after the decode worker has begun to read; the lease ends meanwhile."""
    handed_over(prefill, decode, "before")
    params = prefilled(prefill, "late read")
    before = computed(decode)
    with ThreadPoolExecutor(1) as pool, stopped(prefill):
        ends = time.monotonic() + 6
        body = {**question("late read"), "kv_transfer_params": until_in_s(params, 6)}
        asked = pool.submit(answer, decode, body)
        in_use(decode)
        while time.monotonic() < ends + 1:
            time.sleep(0.1)
        assert not asked.done()
    got = asked.result(SOON_S)
    assert computed(decode) - before > 300, "it was computed and not read"
    assert got == answer(prefill, question("late read"))


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_block_ids": "none", "remote_port": -1},
        {"remote_block_ids": None},
        {"remote_engine_id": None},
        {"remote_block_ids": [[1]]},
        {"remote_block_ids": [[1], [1]]},
        {"remote_num_tokens": 5},
    ],
    ids=["nonsense", "no blocks", "no engine", "too few blocks", "too many groups", "another prompt"],
)
def test_a_hand_off_that_cannot_be_used_is_computed(
    prefill: LocalWorker, decode: LocalWorker, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """vLLM alone would wait for the blocks forever, or its engine would end."""
    name = request.node.callspec.id
    params = prefilled(prefill, name)
    before = read_bytes(decode)
    got = answer(decode, {**question(name), "kv_transfer_params": {**params, **changes}})
    assert read_bytes(decode) == before
    assert got == answer(prefill, question(name))
    release(prefill, name)


def test_a_decode_worker_that_stood_still_until_after_the_lease_computes(
    prefill: LocalWorker, decode: LocalWorker
) -> None:
    params = prefilled(prefill, "stood still")
    before = read_bytes(decode)
    with ThreadPoolExecutor(1) as pool:
        with stopped(decode):
            body = {**question("stood still"), "kv_transfer_params": until_in_s(params, 1)}
            asked = pool.submit(answer, decode, body)
            time.sleep(2)
        got = asked.result(SOON_S)
    assert read_bytes(decode) == before
    assert got == answer(prefill, question("stood still"))
    release(prefill, "stood still")


def test_the_prefill_worker_dies_while_it_is_read_from(prefill: LocalWorker, decode: LocalWorker) -> None:
    """The last test: it stays dead."""
    handed_over(prefill, decode, "alive")
    wanted = answer(prefill, question("dies"))
    params = prefilled(prefill, "dies")
    before = computed(decode)
    with ThreadPoolExecutor(1) as pool:
        with stopped(prefill):
            asked = pool.submit(answer, decode, {**question("dies"), "kv_transfer_params": params})
            in_use(decode)
            prefill.process.kill()
        assert asked.result(SOON_S) == wanted
    assert computed(decode) - before > 300, "it was computed and not read"
    is_free(decode)
