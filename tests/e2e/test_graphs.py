"""The graphs that come with the project, with real vLLM workers: up, serving, down, and nothing left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.ask import Endpoint
from tests.shared_memory import SharedMemoryWatch
from vllm_pd.graph import launcher, metrics_text
from vllm_pd.graph.check import check
from vllm_pd.graph.ports import is_listening
from vllm_pd.graph.read import load
from vllm_pd.graph.status import GraphState

pytestmark = pytest.mark.e2e

CONFIGS = Path(__file__).parents[2] / "configs"
# Longer than what a decode worker rather computes itself.
PROMPT = "The quick brown fox jumps over the lazy dog. " * 60


def serve_and_end(name: str, model: Path, *sets: str) -> None:
    graph = check(
        load(
            str(CONFIGS / f"{name}.yaml"),
            sets=(f"model={model}", "frontend.port=0", "workers.args.served-model-name=m", *sets),
            environ={},
        )
    )
    watch = SharedMemoryWatch()
    watch.start()
    cluster = launcher.start(graph)
    try:
        status = launcher.wait_until_up(cluster.folder)
        assert not launcher.failures(status)
        assert status.state is GraphState.UP
        assert {c.name for c in status.components} == {c.label for c in graph.components} - {"router"}
        answers = [
            Endpoint(status.url, "m").post(
                "/v1/completions", {"model": "m", "prompt": f"{n} {PROMPT}", "max_tokens": 8, "temperature": 0}
            )
            for n in range(3)
        ]
        assert all(answer["usage"]["completion_tokens"] == 8 for answer in answers)
        if graph.component("prefill") is not None:
            # Each of them did some of the work.
            for worker in (i for i in status.instances if i.component in ("prefill", "decode")):
                assert metrics_text.scrape(worker.url)["vllm:request_success_total"] > 0, worker.name
        ports = [int(i.url.rpartition(":")[2]) for i in status.instances if i.url]
    finally:
        left = launcher.stop(cluster.folder)
        cluster.leave_alone()
        cluster.supervisor.wait(60)
        watch.stop()
    assert not left, str(left)
    assert not any(is_listening(port) for port in ports)
    assert watch.left() == []


@pytest.fixture(autouse=True)
def _own_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PD_RUN_DIR", str(tmp_path))


def test_the_whole_graph_serves_and_leaves_nothing(tiny_model: Path) -> None:
    # An idle cluster rather computes prompts where the answer is made.
    serve_and_end("disagg_router", tiny_model, "router.settings.disagg=always")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sets"),
    [("agg", ()), ("agg_router", ()), ("disagg", ("frontend.settings.disagg=always",))],
    ids=["agg", "agg_router", "disagg"],
)
def test_the_other_graphs_serve_and_leave_nothing(name: str, sets: tuple[str, ...], tiny_model: Path) -> None:
    serve_and_end(name, tiny_model, *sets)
