"""The dashboard on a live cluster without models: all queries but those on what only real engines export.

Those run in tests/e2e/test_dashboard.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress

import pytest

from benchmarks.mock_cluster import MODEL, MockCluster, MockRouter
from scripts.prometheus import Programs
from tests.unit.deploy.scraping import Prometheus, answered, dashboard_queries
from vllm_pd.graph.ports import LOOPBACK, free_port

SPAN = "30s"
DEADLINE_S = 900.0
ONLY_REAL = (
    "vllm:nixl_",
    "vllm:kv_offload_",
    "vllm_pd_ssd_",
    "vllm_pd_offload_",
    "vllm_pd_agent_kv_",
    "vllm_pd_agent_index_",
    "vllm_pd_agent_delay_seconds",
)

pytestmark = pytest.mark.timeout(2000)


class Load:
    """Streamed answers of growing prompts, so that there are hits, and short ones, so that not all are split."""

    def __init__(self, router: MockRouter) -> None:
        self._url = f"{router.url}/v1/completions"
        self._turn = 0

    def __call__(self) -> None:
        self._turn += 1
        for size in (40, 4000):
            prompt = f"{self._turn // 3:05} " * (size // 6) + "x" * (16 * (self._turn % 3))
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "stream": True}
            request = urllib.request.Request(self._url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            with suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()


@pytest.fixture(scope="module")
def live(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Load, str]]:
    with MockCluster() as cluster:
        workers = cluster.start_workers(("prefill", "decode", "decode", "both"))
        router = cluster.router("--disagg", "always")
        port = free_port()
        command = [sys.executable, "-m", "vllm_pd.cli", "planner", "run", "--store", cluster.store.url]
        cluster.run("planner", [*command, "--dry-run", "--interval", "1", "--metrics-port", str(port)]).wait_ready(
            f"http://{LOOPBACK}:{port}/health", deadline_s=120
        )
        addresses = {"router:8080": router.url.removeprefix("http://"), "planner:9100": f"{LOOPBACK}:{port}"}
        with Prometheus(programs, tmp_path_factory.mktemp("prometheus"), addresses) as prometheus:
            move = [sys.executable, "-m", "vllm_pd.cli", "role", workers[3].url.removeprefix("http://"), "decode"]
            subprocess.run([*move, "--store", cluster.store.url, "--wait"], check=True, timeout=120)
            yield prometheus, Load(router), cluster.store.url


def test_queries_give_numbers_and_alerts_are_evaluated(live: tuple[Prometheus, Load, str]) -> None:
    prometheus, load, _ = live
    queries = {
        title: expr for title, expr in dashboard_queries(SPAN).items() if not any(name in expr for name in ONLY_REAL)
    }
    left = answered(prometheus, queries, DEADLINE_S, load)
    assert not left, "no number for:\n" + "\n".join(f"  {title}: {expr}" for title, expr in left.items())
    assert prometheus.numbers('sum(up{job="workers", worker!="", model="mock"})') == [4.0]
    assert {rule["name"] for rule in prometheus.rules() if rule["health"] == "err"} == set()
