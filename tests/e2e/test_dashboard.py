"""Every query of the dashboard gives numbers on a live cluster, scraped as the compose file has it scraped.

The cluster: two real workers with all tiers, which hand KV over, four without a model, a router, a planner.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from scripts.prometheus import NoPrometheusError, find
from tests.e2e.conftest import MODEL, tiny_cluster
from tests.unit.deploy.scraping import Prometheus, answered, dashboard_queries
from vllm_pd.graph.local import LocalCluster
from vllm_pd.graph.ports import LOOPBACK, free_port, free_ports
from vllm_pd.graph.process import ManagedProcess, ProcessSpec
from vllm_pd.state import Role

SPAN = "30s"
"""For `$__rate_interval`: four scrapes and more, also on a machine that is busy."""
DEADLINE_S = 900.0
MOCK = "mock"
FAMILIES = 4
"""Prompts that come again, each after so many turns. 7 others of 28 blocks came since then, more than GPU or CPU tier
holds, so that it is on the SSD only. Not many, since on a busy machine a turn may take a minute."""
PROMPT_TOKENS = 900

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]


class Live:
    """The cluster, and what keeps it busy."""

    def __init__(self, cluster: LocalCluster, folder: Path, stack: ExitStack) -> None:
        self.cluster = cluster
        self.planner = f"{LOOPBACK}:{free_port()}"
        self._folder = folder
        self._turn = 0
        self.ports = free_ports(4)
        for port, role in zip(self.ports, ("prefill", "decode", "decode", "both"), strict=True):
            command = ["mock-worker", "--port", str(port), "--role", role, "--store", cluster.store_url]
            mock = self._start(stack, f"mock-{port}", *command, "--model", MOCK)
            mock.wait_ready(f"http://{LOOPBACK}:{port}/health", deadline_s=120)
        command = ["planner", "run", "--store", cluster.store_url, "--metrics-port", self.planner.rpartition(":")[2]]
        self._start(stack, "planner", *command, "--interval", "1", "--dry-run").wait_ready(
            f"http://{self.planner}/health", deadline_s=120
        )

    def _start(self, stack: ExitStack, name: str, *command: str) -> ManagedProcess:
        spec = ProcessSpec(name, [sys.executable, "-m", "vllm_pd.cli", *command], self._folder / f"{name}.log", {})
        return stack.enter_context(ManagedProcess(spec))

    def busy(self) -> None:
        """Streamed answers of both pools. Of the real one a prompt that is new, so that KV is handed over, and one that
        comes again, so that the tiers have something to give back."""
        self._turn += 1
        for seed in (f"new {self._turn}", f"family {self._turn % FAMILIES}"):
            prompt = random.Random(seed).choices(range(3, 403), k=PROMPT_TOKENS)
            self._ask({"model": MODEL, "prompt": prompt, "max_tokens": 6, "stream": True})
        for size in (40, 4000):
            body = {"model": MOCK, "prompt": f"{self._turn:06} " * (size // 7), "max_tokens": 8, "stream": True}
            self._ask(body)

    def _ask(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.cluster.router_url}/v1/completions", data, {"Content-Type": "application/json"}
        )
        with suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()


@pytest.fixture(scope="module")
def live(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("dashboard")
    tiers = {
        # 160 blocks; a turn takes 56 of them.
        "VLLM_PD_CPU_GIB": "0.02",
        "VLLM_PD_SSD_PATH": str(folder / "ssd-decode"),
        "VLLM_PD_SSD_GIB": "0.5",
        "VLLM_PD_SSD_WRITES_PER_DAY": "1000",
        "VLLM_PD_LOAD_GATE": "always",
    }
    made = tiny_cluster(tiny_model, folder, args=("--num-gpu-blocks-override", "72"), env=tiers, decode=1)
    with made, ExitStack() as stack:
        # A folder is one server's.
        made.add_worker(Role.PREFILL, env={"VLLM_PD_SSD_PATH": str(folder / "ssd-prefill")})
        yield Live(made, folder, stack)
    assert not made.left, f"the cluster left behind: {made.left}"


@pytest.fixture(scope="module")
def prometheus(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    try:
        programs = find()
    except NoPrometheusError as e:
        pytest.skip(f"Prometheus is not here: {e}")
    addresses = {"router:8080": live.cluster.router_url.removeprefix("http://"), "planner:9100": live.planner}
    with Prometheus(programs, tmp_path_factory.mktemp("prometheus"), addresses) as running:
        yield running


def test_all_workers_are_found_through_the_router(live: Live, prometheus: Prometheus) -> None:
    left = answered(prometheus, {"all": 'sum(up{job="workers", worker!="", model!=""}) == 6'}, DEADLINE_S, live.busy)
    assert not left, prometheus.ask("up")


def test_every_query_of_the_dashboard_gives_numbers(live: Live, prometheus: Prometheus) -> None:
    move = ["role", f"{LOOPBACK}:{live.ports[3]}", "decode", "--store", live.cluster.store_url, "--wait"]
    subprocess.run([sys.executable, "-m", "vllm_pd.cli", *move], check=True, timeout=120)
    left = answered(prometheus, dashboard_queries(SPAN), DEADLINE_S, live.busy)
    assert not left, "no number for:\n" + "\n".join(f"  {title}: {expr}" for title, expr in left.items())


def test_every_alert_is_evaluated_and_no_critical_one_fires(live: Live, prometheus: Prometheus) -> None:
    rules = prometheus.rules()
    assert rules and {rule["name"] for rule in rules if rule["health"] == "err"} == set()
    critical = 'ALERTS{alertstate="firing", severity="critical"}'
    assert prometheus.ask(critical) == []
