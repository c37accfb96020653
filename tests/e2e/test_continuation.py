"""Decode workers die, stop and lose their engine under streams: the client's answer is the uninterrupted one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import prompts
from tests.e2e.ask import TIE, Endpoint
from tests.e2e.conftest import MODEL, tiny_cluster
from tests.e2e.streams import Stream
from tests.e2e.test_worker_loss import eventually, ready
from vllm_pd.graph import proc_tree
from vllm_pd.graph.local import LocalCluster, LocalWorker

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
TOKENS = 1200
BEFORE = 150
"""Events that the client has when the worker is lost."""


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    # SIGTERM then ends requests at once, as vLLM does by default.
    args = ("--shutdown-timeout", "0")
    made = tiny_cluster(tiny_model, tmp_path_factory.mktemp("continuation"), args=args, prefill=1, decode=2)
    with made:
        yield made
    assert not made.left.processes and not made.left.ports


def asked(path: str, text: str, tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {
        "model": MODEL, **prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, **fields,
    }  # fmt: skip


def streams(url: str) -> list[Stream]:
    """Two streams at once."""
    return [
        Stream(url, CHAT, asked(CHAT, prompts.TEXTS["greek"], stream_options={"include_usage": True})).start(),
        Stream(url, COMPLETION, asked(COMPLETION, prompts.TEXTS["chinese"] * 3)).start(),
    ]


@pytest.fixture(scope="module")
def uninterrupted(cluster: LocalCluster) -> list[Stream]:
    return [stream.finish() for stream in streams(cluster.router_url)]


def serving(cluster: LocalCluster, running: list[Stream]) -> LocalWorker:
    """The decode worker of the first stream that has come far enough."""
    assert eventually(lambda: any(len(stream.events) >= BEFORE for stream in running))
    far = next(stream for stream in running if len(stream.events) >= BEFORE)
    return next(worker for worker in cluster.workers if worker.url.endswith(f"//{far.decode}"))


def usable(cluster: LocalCluster) -> set[str]:
    """URLs of the workers that the router asks."""
    return {worker["url"] for worker in ready(cluster)[1]["workers"] if worker["usable"]}


def family(worker: LocalWorker) -> frozenset[proc_tree.ProcessId]:
    leader = proc_tree.identify(worker.process.pid)
    assert leader is not None
    return proc_tree.family(leader)


def engine(worker: LocalWorker) -> proc_tree.ProcessId:
    (found,) = (process for process in family(worker) if "EngineCor" in Path(f"/proc/{process.pid}/comm").read_text())
    return found


def outcomes(cluster: LocalCluster) -> float:
    return cluster.router_metrics().value("vllm_pd_router_broken_streams_total", outcome="continued")


def check_same(cluster: LocalCluster, wanted: Stream, got: Stream) -> None:
    """Equal texts; where they part, two candidates were equally likely there."""
    assert not got.error
    assert got.events[-1] == b"data: [DONE]"
    assert len({value["id"] for value in got.values}) == 1
    if got.text == wanted.text:
        assert [v["choices"][0]["finish_reason"] for v in got.values if v["choices"]][-1] == "length"
        assert [v["usage"] for v in got.values if v.get("usage")] == [
            v["usage"] for v in wanted.values if v.get("usage")
        ]
        return
    same = next(i for i, (a, b) in enumerate(zip(wanted.text, got.text, strict=False)) if a != b)
    body = {**wanted.body, "stream": False, "logprobs": True if wanted.path == CHAT else 2}
    body.pop("stream_options", None)
    if wanted.path == CHAT:
        body["top_logprobs"] = 2
    choice = Endpoint(cluster.router_url, MODEL).post(wanted.path, body)["choices"][0]["logprobs"]
    if wanted.path == CHAT:
        steps = [(step["token"], sorted(top["logprob"] for top in step["top_logprobs"])) for step in choice["content"]]
    else:
        tops = [sorted(top.values()) for top in choice["top_logprobs"]]
        steps = list(zip(choice["tokens"], tops, strict=True))
    length = 0
    for token, best in steps:
        length += len(token)
        if length > same:
            assert best[-1] - best[-2] < TIE, (
                f"parted at {same}: {wanted.text[same - 20 :][:60]!r}, {got.text[same - 20 :][:60]!r}"
            )
            return


def kill(worker: LocalWorker) -> None:
    worker.process.kill()


def stop(worker: LocalWorker) -> None:
    proc_tree.send(family(worker), signal.SIGSTOP)


def kill_engine(worker: LocalWorker) -> None:
    proc_tree.send([engine(worker)], signal.SIGKILL)


def terminate(worker: LocalWorker) -> None:
    proc_tree.send([process for process in family(worker) if process.pid == worker.process.pid], signal.SIGTERM)


@pytest.mark.parametrize("lose", [kill, kill_engine, terminate, stop])
def test_a_decode_worker_that_is_lost_in_mid_stream_does_not_change_the_answer(
    cluster: LocalCluster,
    uninterrupted: list[Stream],
    lose: Callable[[LocalWorker], None],
) -> None:
    before = outcomes(cluster)
    running = streams(cluster.router_url)
    # One that is not streamed can be asked again as a whole.
    wholes = [
        Stream(cluster.router_url, stream.path, {k: v for k, v in stream.body.items() if not k.startswith("stream")})
        for stream in running
    ]
    for whole in wholes:
        whole.start()
    lost = serving(cluster, running)
    members = family(lost)
    lose(lost)
    try:
        for wanted, stream in zip(uninterrupted, running, strict=True):
            check_same(cluster, wanted, stream.finish())
        for whole in wholes:
            answer = whole.finish().answer
            assert "choices" in answer, answer
            assert answer["choices"][0]["finish_reason"] == "length"
        # Counted when its end has been sent.
        assert eventually(lambda: outcomes(cluster) > before)
    finally:
        if lose is stop:
            proc_tree.send(members, signal.SIGCONT)
        else:
            lost.process.kill()
            cluster.restart(lost)
    assert eventually(lambda: usable(cluster) == {worker.url for worker in cluster.workers})
