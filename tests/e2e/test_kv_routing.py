"""A router on real workers: every turn of a chat goes where its prefix is, and the engines' own counts agree."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import wait
from tests.e2e.ask import Endpoint
from tests.e2e.conftest import BLOCK, MODEL, WORKER_IN_ENGINE, tiny_cluster
from vllm_pd.graph.local import DEFAULT_START_DEADLINE_S, LocalCluster, LocalWorker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SOON_S = 30.0
until = partial(wait.until, seconds=SOON_S)
TURNS = 8
EXPLAIN = {"x-vllm-pd-explain": "1"}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    made = tiny_cluster(
        tiny_model,
        tmp_path_factory.mktemp("kv-routing"),
        args=("--enable-prompt-tokens-details",),
        env={"VLLM_SERVER_DEV_MODE": "1", **WORKER_IN_ENGINE},
        decode=2,
    )
    with made:
        yield made
    assert not made.left, f"the cluster left behind: {made.left}"


def hits(worker: LocalWorker) -> float:
    """Tokens that the engine found in its own cache or in its tier in host memory, so far."""
    metrics = worker.metrics()
    return metrics.value("vllm:prefix_cache_hits_total") + metrics.value("vllm:external_prefix_cache_hits_total")


@dataclass
class Turn:
    """What one question led to."""

    worker: LocalWorker
    predicted: int
    """Tokens that the router expected in that worker's cache."""
    reported: int
    """Tokens that were, by the answer's usage."""
    counted: float
    """The same by the engine's metrics."""
    prompt: int


@dataclass
class Chat:
    """A conversation through the router."""

    cluster: LocalCluster
    topic: str
    messages: list[dict[str, str]] = field(default_factory=list)
    prompt: int = 0
    """Tokens of the last prompt."""

    def body(self) -> dict[str, Any]:
        return {"model": MODEL, "messages": self.messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def explained(self) -> Any:
        return Endpoint(self.cluster.router_url, MODEL).post("/v1/explain", self.body())

    def overlaps(self) -> dict[str, int]:
        """Worker -> blocks of the next prompt that the router knows it to hold."""
        (pool,) = self.explained()["pools"]
        return {c["worker"]: sum(c["overlap"].values()) for c in pool["candidates"]}

    def ask(self, question: str) -> Turn:
        """One more turn. Waits first until the router knows the blocks of the turn before."""
        self.messages.append({"role": "user", "content": f"{question} of {self.topic}, please. " * 8})
        until(lambda: max(self.overlaps().values()) >= self.prompt // BLOCK, self.explained)
        before = {worker.name: hits(worker) for worker in self.cluster.workers}
        request = urllib.request.Request(
            self.cluster.router_url + CHAT,
            json.dumps(self.body()).encode(),
            {"content-type": "application/json", **EXPLAIN},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer, decision = json.load(reply), json.loads(reply.headers["x-vllm-pd-decision"])
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
        usage = answer["usage"]
        self.prompt = usage["prompt_tokens"]
        assert decision["tokens"] == self.prompt, "the router counts tokens as the engine does"
        worker = next(w for w in self.cluster.workers if w.url.endswith(decision["decode"]))
        held = next(c for c in decision["candidates"] if c[0] == decision["decode"])
        return Turn(
            worker,
            min(sum(held[1:4]), (self.prompt - 1) // BLOCK) * BLOCK,
            (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0),
            hits(worker) - before[worker.name],
            self.prompt,
        )


def reset(worker: LocalWorker) -> None:
    """Make the worker forget every block, on all tiers. It refuses while copies are under way."""

    def done() -> bool:
        url = f"{worker.url}/reset_prefix_cache?reset_external=true"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
            return b"true" in answer.read()

    until(done, lambda: "the cache is in use")


def test_every_turn_goes_where_its_prefix_is_and_hits_are_as_predicted(
    cluster: LocalCluster, record_property: Callable[..., None]
) -> None:
    chats = [Chat(cluster, topic) for topic in ("rivers", "engines", "bread")]
    turns: list[list[Turn]] = [[] for _ in chats]
    for n in range(TURNS):
        # In another order each time, so that taking turns would be seen.
        for index in (range(3), range(2, -1, -1))[n % 2]:
            turns[index].append(chats[index].ask(f"Tell me part {n}"))
    for chat, its in zip(chats, turns, strict=True):
        shown = [(t.worker.name, t.prompt, t.predicted, t.reported, t.counted) for t in its]
        record_property(chat.topic, shown)
        print(f"\n{chat.topic}: worker, prompt tokens, predicted, reported and counted hits: {shown}")
        assert len({t.worker.name for t in its}) == 1, shown
        for turn in its:
            assert abs(turn.reported - turn.predicted) <= BLOCK, shown
            assert abs(turn.counted - turn.predicted) <= BLOCK, shown
        assert all(t.predicted > 0 for t in its[1:]), shown
    assert len({its[0].worker.name for its in turns}) == 2, "both workers have work"
    metrics = cluster.router_metrics()
    assert metrics.value("vllm_pd_router_known_prompts_total") >= 3 * TURNS
    assert metrics.value("vllm_pd_router_unknown_prompts_total") == 0
    assert metrics.value("vllm_pd_router_hash_mismatch") == 0
    assert "tokenizes as this router does" in (cluster.log_dir / "router.log").read_text()


def test_eviction_moves_the_next_turn(cluster: LocalCluster) -> None:
    chat = Chat(cluster, "clocks")
    first = chat.ask("Tell me the beginning")
    other = next(worker for worker in cluster.workers if worker is not first.worker)
    assert chat.ask("Tell me more").worker is first.worker
    # The other worker gets the first turn too: it has some of the prefix, the first one all.
    Endpoint(other.url, MODEL).post(CHAT, {**chat.body(), "messages": chat.messages[:1]})
    here, there = (worker.url.removeprefix("http://") for worker in (first.worker, other))
    until(lambda: 0 < chat.overlaps()[there] < chat.overlaps()[here], chat.explained)
    assert chat.ask("Tell me even more").worker is first.worker
    reset(first.worker)
    until(lambda: chat.overlaps()[here] == 0, chat.explained)
    chat.prompt = 0
    moved = chat.ask("Tell me the end")
    assert moved.worker is other
    assert moved.predicted > 0
    assert abs(moved.counted - moved.predicted) <= BLOCK


def test_router_that_restarts_has_its_index_back_before_it_is_ready(cluster: LocalCluster) -> None:
    chat = Chat(cluster, "islands")
    first = chat.ask("Tell me the beginning")
    second = chat.ask("Tell me more")
    assert second.worker is first.worker
    router = cluster.router
    assert router is not None
    router.kill()
    router.start()
    router.wait_ready(f"{cluster.router_url}/ready", deadline_s=DEFAULT_START_DEADLINE_S)
    assert cluster.router_metrics().value("vllm_pd_router_index_loaded") == 1
    chat.messages.append({"role": "user", "content": "And the end?"})
    assert chat.overlaps()[first.worker.url.removeprefix("http://")] >= second.prompt // BLOCK
    chat.messages.pop()
    assert chat.ask("Tell me the end").worker is first.worker
