"""What a client sees when the decode worker of its stream is lost: how long the stream pauses, and what it says then.

    python -m benchmarks.failover                 # about six minutes on two cores
    python -m benchmarks.failover --quick         # one loss of each kind, about three minutes
    python -m benchmarks.failover --json          # one JSON object on stdout

Two decode workers (`vllm serve`, tiny model) behind a router. Several greedy streams run at once, chats and
completions; when all are under way the worker that has more of them is lost: killed, stopped (SIGSTOP), or its engine
process killed behind a living API server. The pause is the longest time between two events of a stream that was
continued. The answers are compared with those of the same requests undisturbed. Lost workers are started again.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.common import Report, Target, parse_arguments, percentile, progress
from scripts.models import tiny_model_dir
from vllm_pd.graph import proc_tree
from vllm_pd.graph.local import LocalCluster, LocalWorker

MODEL = "m"
STREAMS = 4
OUTPUT = 500
BEFORE = 60
"""Events that every stream has had when the worker is lost."""
DEADLINE_S = 120.0
LENGTHS = (100, 1400)
"""Prompt tokens: what the other worker has to compute before it goes on."""
VOCABULARY = range(300, 2000)

Lose = Callable[[LocalWorker], None]


def kill(worker: LocalWorker) -> None:
    """SIGKILL to all of its processes."""
    worker.process.kill()


def kill_engine(worker: LocalWorker) -> None:
    """SIGKILL to the process that computes; the API server lives and says so in the stream."""
    names = {process: Path(f"/proc/{process.pid}/comm").read_text() for process in _family(worker)}
    proc_tree.send([process for process, name in names.items() if "EngineCor" in name], signal.SIGKILL)


def stop(worker: LocalWorker) -> None:
    """SIGSTOP to all of its processes: connections stand, nothing comes."""
    proc_tree.send(_family(worker), signal.SIGSTOP)


LOSSES: dict[str, Lose] = {"SIGKILL": kill, "engine SIGKILL": kill_engine, "SIGSTOP": stop}


def _family(worker: LocalWorker) -> frozenset[proc_tree.ProcessId]:
    leader = proc_tree.identify(worker.process.pid)
    return proc_tree.family(leader) if leader is not None else frozenset()


@dataclass(slots=True)
class Told:
    """What a client got of one stream."""

    text: str = ""
    at: list[float] = field(default_factory=list)
    """When each event came."""
    error: str = ""

    @property
    def pause(self) -> float:
        """Longest time between two events, in seconds."""
        return max((b - a for a, b in zip(self.at, self.at[1:], strict=False)), default=0.0)


def requests(length: int, number: int) -> list[tuple[str, dict[str, Any]]]:
    """Path and body of each stream; `number` makes prompts that no cache has."""
    span = len(VOCABULARY)
    out: list[tuple[str, dict[str, Any]]] = []
    for n in range(STREAMS):
        ids = [VOCABULARY[(number * 7919 + n * 104729 + i * i * 31 + i) % span] for i in range(length)]
        body = {"model": MODEL, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
        if n % 2:
            words = " ".join(f"word{token}" for token in ids[: length // 5])
            out.append(("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": words}]}))
        else:
            out.append(("/v1/completions", {**body, "prompt": ids}))
    return out


async def tell(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any], told: Told) -> None:
    """Read one stream to its end."""
    async with session.post(url + path, json=body) as answer:
        rest = b""
        async for chunk in answer.content.iter_any():
            *events, rest = (rest + chunk).split(b"\n\n")
            now = time.monotonic()
            for event in events:
                data = event.strip().removeprefix(b"data: ")
                if not data or data == b"[DONE]":
                    continue
                value = msgspec.json.decode(data)
                told.at.append(now)
                if "error" in value:
                    told.error = value["error"]["message"]
                for choice in value.get("choices", ()):
                    told.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""


async def round_of(
    cluster: LocalCluster, asked: Sequence[tuple[str, dict[str, Any]]], lose: Lose | None
) -> tuple[list[Told], LocalWorker | None]:
    """All streams at once; with `lose`, the worker that was lost when they were under way."""
    told = [Told() for _ in asked]
    lost: LocalWorker | None = None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        running = [
            asyncio.create_task(tell(session, cluster.router_url, path, body, one))
            for (path, body), one in zip(asked, told, strict=True)
        ]
        if lose is not None:
            while any(len(one.at) < BEFORE for one in told) and not any(task.done() for task in running):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            lost = await asyncio.to_thread(busiest, cluster)
            await asyncio.to_thread(lose, lost)
        await asyncio.gather(*running)
    return told, lost


def busiest(cluster: LocalCluster) -> LocalWorker:
    """The worker with most requests of the router."""
    metrics = cluster.router_metrics()

    def load(worker: LocalWorker) -> float:
        return metrics.value("vllm_pd_router_inflight_requests", worker=worker.url.rpartition("//")[2])

    return max(cluster.workers, key=load)


def streams_that_broke(cluster: LocalCluster) -> dict[str, float]:
    """How many broke off so far, by what became of them."""
    metrics = cluster.router_metrics()
    name = "vllm_pd_router_broken_streams_total"
    return {outcome: metrics.value(name, outcome=outcome) for outcome in ("continued", "completed", "failed", "ended")}


def measure(cluster: LocalCluster, name: str, length: int, rounds: int, first: int) -> dict[str, Any]:
    """One row: `rounds` losses of one kind."""
    pauses: list[float] = []
    usual: list[float] = []
    equal = different = errors = broken = 0
    for number in range(rounds):
        progress(f"{name}, {length} tokens: {number + 1} of {rounds}")
        asked = requests(length, first + number)
        before = streams_that_broke(cluster)
        told, lost = asyncio.run(round_of(cluster, asked, LOSSES[name]))
        assert lost is not None
        after = streams_that_broke(cluster)
        hit = int(sum(after.values()) - sum(before.values()))
        broken += hit
        by_pause = sorted(told, key=lambda one: one.pause, reverse=True)
        pauses += [one.pause for one in by_pause[:hit]]
        for one in told:
            usual += [b - a for a, b in zip(one.at[:BEFORE], one.at[1:BEFORE], strict=False)]
        if LOSSES[name] is stop:
            proc_tree.send(_family(lost), signal.SIGCONT)
        else:
            lost.process.kill()
            cluster.restart(lost)
        wait_until_usable(cluster)
        undisturbed, _ = asyncio.run(round_of(cluster, asked, None))
        for one, wanted in zip(told, undisturbed, strict=True):
            errors += bool(one.error)
            equal += one.text == wanted.text
            different += one.text != wanted.text and not one.error
    return {
        "loss": name,
        "prompt tokens": length,
        "streams": STREAMS * rounds,
        "broken": broken,
        "ended by error": errors,
        "answers equal": equal,
        "answers different": different,
        "pause p50 ms": round(percentile(pauses, 50) * 1e3, 1) if pauses else None,
        "pause max ms": round(max(pauses) * 1e3, 1) if pauses else None,
        "mean ms between events before": round(sum(usual) / len(usual) * 1e3, 2),
    }


def wait_until_usable(cluster: LocalCluster) -> None:
    """Until the router asks both workers again. Raises TimeoutError."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with urllib.request.urlopen(f"{cluster.router_url}/ready", timeout=DEADLINE_S) as answer:
            workers = json.load(answer)["workers"]
        if sum(worker["usable"] for worker in workers) >= len(cluster.workers):
            return
        if time.monotonic() > deadline:
            raise TimeoutError("the router did not take a restarted worker back; see its log")
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0 when every target was reached, else 1."""
    args = parse_arguments("The pause of a client's stream when its decode worker is lost.", argv)
    report = Report("failover")
    lengths, rounds = ((LENGTHS[-1],), 1) if args.quick else (LENGTHS, 2)
    with LocalCluster(
        model=tiny_model_dir(), decode=2, max_model_len=2048, kv_blocks=320,
        worker_args=("--served-model-name", MODEL, "--dtype", "float32"),
    ) as cluster:  # fmt: skip
        asyncio.run(round_of(cluster, requests(LENGTHS[0], -1), None))
        number = 0
        for name in LOSSES:
            for length in lengths:
                report.results.append(measure(cluster, name, length, rounds, number))
                number += rounds
    bad = sum(row["ended by error"] + row["answers different"] for row in report.results)
    report.targets.append(Target.at_most("streams that ended by an error or with another answer", bad, 0))
    report.show(as_json=args.json)
    return 0 if all(target.ok for target in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
