"""LMCache in place of the tiers: a prefill and a decode worker that share one real `lmcache server`."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("lmcache")

from benchmarks.lmcache_server import LMCacheServer
from tests.e2e.ask import Answer, Endpoint, Prompt, compare
from tests.e2e.conftest import BLOCK, MODEL, tiny_cluster
from tests.e2e.prompts import TEXTS
from vllm_pd.graph.local import LocalCluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CHUNK = 2 * BLOCK
PROMPTS = 8
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What runs."""

    cluster: LocalCluster
    server: LMCacheServer

    @property
    def router(self) -> Endpoint:
        return Endpoint(self.cluster.router_url, MODEL)

    def loaded(self, name: str = "prefill-0") -> float:
        """Prompt tokens that this worker has loaded. A prefill worker can have them only from LMCache."""
        metrics = self.cluster.worker(name).metrics()
        return metrics.value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")

    def forget(self) -> None:
        """Empty the GPU-side caches of both workers."""
        for name in ("prefill-0", "decode-0"):
            url = f"{self.cluster.worker(name).url}/reset_prefix_cache"
            urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30).close()


@pytest.fixture(scope="module")
def scene(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    logs = tmp_path_factory.mktemp("lmcache")
    with LMCacheServer(logs, chunk=CHUNK) as server:
        # On a machine that is busy with other tests a server that answers late is not dead.
        file = logs / "pd.yaml"
        file.write_text("lmcache: {mq_timeout: 15, heartbeat_interval: 4}\n")
        settings = {
            "VLLM_PD_CONFIG": str(file), "VLLM_PD_OFFLOAD": "lmcache", "VLLM_PD_LMCACHE_URL": server.url,
            "VLLM_PD_CPU_GIB": "", "VLLM_SERVER_DEV_MODE": "1",
        }  # fmt: skip
        cluster = tiny_cluster(tiny_model, logs, env=settings, prefill=1, decode=1)
        with cluster:
            yield Scene(cluster, server)
        assert not cluster.left, f"the cluster left behind: {cluster.left}"
        assert server.shared_memory, "the end of its workers took the server's memory away"
    assert server.shared_memory == []


def texts(scene: Scene, tokens: int = 600) -> list[Prompt]:
    """Prompts that differ from their first token on."""
    ids = scene.router.token_ids(" ".join(TEXTS.values()) * 8)
    starts = range(0, 7 * PROMPTS, 7)
    return [
        Prompt(f"prompt {n}", "completion", {"prompt": ids[start : start + tokens]}) for n, start in enumerate(starts)
    ]


def ask(scene: Scene, prompts: list[Prompt], at_once: int = 1) -> list[Answer]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(scene.router.ask, prompts))


def assert_same(wanted: list[Answer], got: list[Answer]) -> None:
    for one, other in zip(wanted, got, strict=True):
        verdict = compare(one, other)
        assert verdict.equal or verdict.tie_at is not None, verdict.detail


def test_prompts_come_back_from_lmcache_with_the_same_answers(scene: Scene) -> None:
    prompts = texts(scene)
    whole = sum(len(prompt.body["prompt"]) // CHUNK * CHUNK for prompt in prompts)
    first = ask(scene, prompts)
    before = scene.loaded()
    scene.forget()
    assert_same(first, ask(scene, prompts))
    # A read that comes late on a busy machine is computed.
    assert scene.loaded() - before >= 0.75 * whole
    # Several at once, with loads, stores, hand-offs and evictions from the small GPU cache in between.
    scene.forget()
    assert_same(first * 2, ask(scene, prompts * 2, at_once=6))


def test_another_salt_is_another_tenant(scene: Scene) -> None:
    (prompt,) = texts(scene)[:1]
    salted = [replace(prompt, body={**prompt.body, "cache_salt": salt}) for salt in ("one of many", "two" * 40)]
    answers = ask(scene, [prompt, *salted])
    scene.forget()
    before = scene.loaded()
    other = replace(prompt, body={**prompt.body, "cache_salt": "of nobody"})
    assert_same(answers[:1], ask(scene, [other]))
    assert scene.loaded() == before, "blocks of another tenant were loaded"
    assert_same(answers[1:], ask(scene, salted))
    assert scene.loaded() > before, "a tenant's own blocks were not"


def test_a_server_that_is_killed_is_a_miss_and_one_that_comes_back_is_used_again(scene: Scene) -> None:
    prompts = texts(scene)
    wanted = ask(scene, prompts)
    scene.forget()
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask, scene, prompts * 3, 4)
        scene.server.process.kill()
        assert_same(wanted * 3, answers.result(timeout=4 * PATIENCE_S))
    scene.server.restart()
    deadline = time.monotonic() + PATIENCE_S
    before = scene.loaded()
    while scene.loaded() == before:
        assert time.monotonic() < deadline, "nothing was loaded from the server that came back"
        scene.forget()
        assert_same(wanted[:2], ask(scene, prompts[:2]))
        time.sleep(1.0)
