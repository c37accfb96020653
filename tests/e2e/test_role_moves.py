"""Real workers change their roles under load: nothing fails, every answer is right, every block is free afterwards."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import prompts
from tests.e2e.ask import Endpoint
from tests.e2e.conftest import MODEL, tiny_cluster
from tests.e2e.streams import Stream
from tests.e2e.test_continuation import CHAT, COMPLETION, asked, check_same
from tests.e2e.test_released_blocks import is_free
from tests.e2e.test_worker_loss import eventually
from vllm_pd.graph.local import LocalCluster, LocalWorker
from vllm_pd.roles import Moved, request_move, wait_for_move
from vllm_pd.state import MoveState, Role, open_registry, open_roles

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

TIMEOUT_S = 120.0
TOKENS = 48
CLIENTS = 3


@pytest.fixture(scope="module")
def three(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """With a decode worker to spare."""
    made = tiny_cluster(tiny_model, tmp_path_factory.mktemp("roles"), prefill=1, decode=2)
    with made:
        yield made
    assert not made.left, f"the cluster left behind: {made.left}"


def move(cluster: LocalCluster, worker: LocalWorker, to: Role, timeout_s: float = TIMEOUT_S) -> Moved:
    """Have a worker change its role, and wait for the end of it."""

    async def run() -> Moved:
        assert cluster.store is not None
        registry = open_registry(cluster.store.url, cluster.namespace, timeout_s=10.0)
        roles = open_roles(cluster.store.url, cluster.namespace, timeout_s=10.0)
        try:
            asked = await request_move(registry, roles, worker.url, to, timeout_s=timeout_s)
            assert asked.ok and asked.record is not None and asked.wish is not None, asked.detail
            return await wait_for_move(registry, asked.record, asked.wish)
        finally:
            await registry.close()
            await roles.close()

    return asyncio.run(run())


def roles_seen(cluster: LocalCluster) -> dict[str, str]:
    """By URL, as the router tells."""
    workers: list[dict[str, Any]] = _get(cluster, "/v1/roles")["workers"]
    return {worker["url"]: worker["role"] for worker in workers}


def _get(cluster: LocalCluster, path: str) -> Any:
    with urllib.request.urlopen(cluster.router_url + path, timeout=60) as answer:
        return json.load(answer)


def body(client: int, turn: int) -> tuple[str, dict[str, Any]]:
    texts = sorted(prompts.TEXTS)
    name = texts[(client + turn) % len(texts)]
    path = CHAT if turn % 2 else COMPLETION
    return path, asked(path, f"{client} {turn % 4} {prompts.TEXTS[name] * 3}", TOKENS)


class Load(threading.Thread):
    """One client that asks one stream after the other until it is told to stop."""

    def __init__(self, cluster: LocalCluster, number: int) -> None:
        super().__init__(daemon=True)
        self.streams: list[Stream] = []
        self._cluster = cluster
        self._number = number
        self._stop_it = threading.Event()

    def run(self) -> None:
        turn = 0
        while not self._stop_it.is_set():
            stream = Stream(self._cluster.router_url, *body(self._number, turn)).start()
            self.streams.append(stream)
            stream.finish()
            turn += 1

    def end(self) -> list[Stream]:
        self._stop_it.set()
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        return self.streams


def test_to_both_and_back_under_load(cluster: LocalCluster) -> None:
    back_and_forth(cluster, cluster.worker("prefill-0"), [Role.BOTH, Role.PREFILL])


@pytest.mark.slow
def test_back_and_forth_under_load(three: LocalCluster) -> None:
    back_and_forth(three, three.worker("decode-1"), [Role.PREFILL, Role.DECODE] * 10)


def back_and_forth(cluster: LocalCluster, worker: LocalWorker, to_roles: list[Role]) -> None:
    """Move it so while clients ask; then compare every answer, and look for blocks that stayed."""
    plain: dict[str, Stream] = {}
    load = [Load(cluster, number) for number in range(CLIENTS)]
    for client in load:
        client.start()
    took = []
    try:
        for to in to_roles:
            done = sum(len(client.streams) for client in load)
            moved = move(cluster, worker, to)
            assert moved.done and moved.move is not None and moved.move.state is MoveState.DONE, moved.detail
            took.append(moved.move.took_ms / 1000)
            assert eventually(lambda to=to: roles_seen(cluster)[worker.url] == to)  # type: ignore[misc]
            # It is asked to do its new work before it moves again.
            assert eventually(lambda done=done: sum(len(client.streams) for client in load) > done + 2)  # type: ignore[misc]
    finally:
        streams = [stream for client in load for stream in client.end()]
    for stream in streams:
        key = f"{stream.path} {stream.body}"
        if key not in plain:
            plain[key] = Stream(cluster.worker("decode-0").url, stream.path, stream.body).start().finish()
        assert not stream.failure and not stream.error, stream.error
        check_same(cluster, plain[key], stream)
    all_are_free(cluster)
    took.sort()
    print(
        f"\n{len(took)} moves under {CLIENTS} clients, {len(streams)} streams, none failed: "
        f"a move took {took[0]:.1f} to {took[-1]:.1f} s, median {took[len(took) // 2]:.1f} s"
    )


def all_are_free(cluster: LocalCluster) -> None:
    for worker in cluster.workers:
        if worker.role is not None:
            is_free(worker)


@pytest.mark.slow
def test_long_streams_go_on_at_another_worker(three: LocalCluster) -> None:
    cluster, worker = three, three.worker("decode-1")
    wanted = [
        Stream(cluster.worker("decode-0").url, path, asked(path, prompts.TEXTS[text], 1200)).start().finish()
        for path, text in ((CHAT, "greek"), (COMPLETION, "german"))
    ]
    running = [Stream(cluster.router_url, stream.path, stream.body).start() for stream in wanted]
    assert eventually(lambda: all(stream.decode and len(stream.events) > 20 for stream in running))
    here = [stream for stream in running if worker.url.endswith(f"//{stream.decode}")]
    other = worker if here else cluster.worker("decode-0")
    began = time.monotonic()
    moved = move(cluster, other, Role.PREFILL, 8.0)
    assert moved.done, f"{moved.detail} ({time.monotonic() - began:.1f} s)"
    for a, b in zip(wanted, running, strict=True):
        check_same(cluster, a, b.finish())
    assert move(cluster, other, Role.DECODE).done
    all_are_free(cluster)


@pytest.mark.slow
def test_a_worker_that_moved_is_warm(three: LocalCluster) -> None:
    """What it has computed as a decode worker it hands over as a prefill worker, without computing it again."""
    cluster = three
    worker, first = cluster.worker("decode-1"), cluster.worker("prefill-0")
    text = prompts.TEXTS["french"] * 6
    Endpoint(worker.url, MODEL).post(COMPLETION, {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0})
    assert move(cluster, worker, Role.PREFILL).done
    assert eventually(lambda: roles_seen(cluster)[worker.url] == Role.PREFILL)
    before = worker.metrics().value("vllm:prompt_tokens_by_source_total", source="local_compute")
    body = {"model": MODEL, "prompt": text, "max_tokens": 4, "temperature": 0}
    Endpoint(cluster.router_url, MODEL).post(COMPLETION, body)
    computed = worker.metrics().value("vllm:prompt_tokens_by_source_total", source="local_compute") - before
    assert computed < 64
    assert first.process.is_running
    assert move(cluster, worker, Role.DECODE).done
