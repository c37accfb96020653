"""What a router costs: its CPU time per request, and the latency it adds to a direct connection.

One mock worker process, one router process, one closed-loop load in this process, all on loopback. Each router gets
the same requests: a 20-word chat and a chat with a 30 KB body, plain and streamed, over 1 and over 16 connections.
Ours is measured passing requests whole and splitting them over a prefill and a decode worker; `vllm-router` and
`sglang-router` are measured too where their commands are installed. Each load runs in several rounds and the best one
counts: other programs on the machine only ever add. At last ours routes chats with a new turn each by an exact block
index (`new_turns`), against the same router as a bare proxy.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import new_turns
from benchmarks.common import Report, Target, cpu_seconds, parse_arguments, percentile, progress
from benchmarks.load import LoadError, http_request, run_load
from vllm_pd.graph.ports import free_port, free_ports, is_listening
from vllm_pd.graph.process import ManagedProcess, ProcessError, ProcessSpec

PATH = "/v1/chat/completions"
START_DEADLINE_S = 60.0
WORDS = "the quick brown fox jumps over the lazy dog while seven small birds sing a song about warm rain today"

# Microseconds per request, small body and 30 KB. First targets on two cores that the load, the mock and the router
# share; a leaner data path is to bring them down.
CPU_US = {"vllm-pd whole": (300.0, 400.0), "vllm-pd split": (600.0, 700.0)}
ADDED_P50_US = (500.0, 700.0)
# What finding the blocks of a new turn and placing it by them may cost, microseconds per request.
BY_BLOCKS_US = 200.0


@dataclass(frozen=True, slots=True)
class Case:
    """One load."""

    body: str
    stream: bool
    connections: int
    requests: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Contender:
    """A router to measure: how to start it on a port in front of the workers. `direct` has no command."""

    name: str
    command: Callable[[int, Sequence[int]], list[str]] | None
    health: str = "/health"


def cases(quick: bool) -> list[Case]:
    """Every load. Quick ones have fewer and shorter rounds."""
    rounds, factor = (2, 1) if quick else (5, 3)
    return [
        Case(body, stream, connections, factor * requests, rounds)
        for body in ("small", "30 KB")
        for stream, connections, requests in (
            (False, 1, 250),
            (False, 16, 1200),
            (True, 1, 30),
            (True, 16, 320),
        )
    ]


def chat_body(kind: str, stream: bool) -> bytes:
    """The request's JSON."""
    messages: list[dict[str, str]] = [{"role": "user", "content": WORDS}]
    if kind != "small":
        turns = 10
        text = (WORDS + " ") * (30_000 // turns // (len(WORDS) + 1))
        messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"{n} {text}"} for n in range(turns)]
    body: dict[str, Any] = {"model": "mock", "messages": messages, "max_tokens": 64}
    if stream:
        body["stream"] = True
    return json.dumps(body).encode()


def contenders() -> tuple[list[Contender], list[str]]:
    """Routers that can be measured here, and a note for each that cannot."""
    ours = [sys.executable, "-m", "vllm_pd.router.cli", "--log-level", "warning", "--port"]

    def whole(port: int, workers: Sequence[int]) -> list[str]:
        return [*ours, str(port), "--worker", f"http://127.0.0.1:{workers[0]}=both"]

    def split(port: int, workers: Sequence[int]) -> list[str]:
        roles = ("prefill", "decode")
        named = [f"--worker=http://127.0.0.1:{worker}={role}" for worker, role in zip(workers, roles, strict=True)]
        return [*ours, str(port), "--disagg", "always", *named]

    def without_ids(port: int, workers: Sequence[int]) -> list[str]:
        return [*whole(port, workers), "--continue-streams", "0"]

    found = [
        Contender("direct", None),
        Contender("vllm-pd whole", whole),
        Contender("vllm-pd whole, streams not continued", without_ids),
        Contender("vllm-pd split", split),
    ]
    notes = []
    if command := shutil.which("vllm-router"):
        found += [
            Contender("vllm-router round_robin", lambda port, workers: _peer([command], port, workers)),
            Contender("vllm-router P/D nixl", lambda port, workers: _vllm_router_pd(command, port, workers)),
        ]
    else:
        notes.append("vllm-router was not measured: no such command on PATH (pip install vllm-router)")
    if sglang := shutil.which("sglang-router"):
        found.append(Contender("sglang-router round_robin", lambda port, workers: _sglang(sglang, port, workers)))
    else:
        notes.append("sglang-router was not measured: no such command on PATH (pip install sglang-router)")
    return found, notes


def _peer(command: list[str], port: int, workers: Sequence[int]) -> list[str]:
    address = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    quiet = ["--log-level", "error", "--policy", "round_robin"]
    return [*command, "--worker-urls", f"http://127.0.0.1:{workers[0]}", *address, *quiet]


def _sglang(command: str, port: int, workers: Sequence[int]) -> list[str]:
    return _peer([command, "launch"], port, workers)


def _vllm_router_pd(command: str, port: int, workers: Sequence[int]) -> list[str]:
    urls = [f"http://127.0.0.1:{worker}" for worker in workers]
    address = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    mode = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", urls[0], "--decode", urls[1]]
    return [command, *mode, *address, "--log-level", "error", "--policy", "round_robin"]


def measure(contender: Contender, plan: Sequence[Case], workers: Sequence[int], logs: Path) -> list[dict[str, Any]]:
    """Start the router, run every case, end it.

    Raises:
        ProcessError: it did not start.
        LoadError: it answered with an error.
    """
    with ExitStack() as stack:
        pid, port = 0, workers[-1]
        if contender.command is not None:
            port = free_port()
            command = contender.command(port, workers)
            log = logs / f"{contender.name.replace(' ', '-').replace('/', '')}.log"
            process = stack.enter_context(ManagedProcess(ProcessSpec(contender.name, command, log)))
            process.wait_ready(lambda: _serves(port), deadline_s=START_DEADLINE_S)
            pid = process.pid
        return [_run(contender, case, pid, port) for case in plan]


def _serves(port: int) -> bool:
    """Whether a request goes through the router: it listens and has found its workers."""
    if not is_listening(port):
        return False
    try:
        uvloop.run(run_load(port, http_request(PATH, chat_body("small", False)), requests=1, connections=1))
    except (LoadError, OSError):
        return False
    return True


def _run(contender: Contender, case: Case, pid: int, port: int) -> dict[str, Any]:
    """The best round of one case, by CPU time where there is a router, else by latency."""
    request = http_request(PATH, chat_body(case.body, case.stream))
    warm_up = min(case.requests // 4, 100)
    uvloop.run(run_load(port, request, requests=warm_up, connections=case.connections))
    rounds = [_round(contender, case, request, pid, port) for _ in range(case.rounds)]
    return min(rounds, key=lambda row: (row["cpu_us"] or 0.0, row["p50_us"]))


def _round(contender: Contender, case: Case, request: bytes, pid: int, port: int) -> dict[str, Any]:
    cpu_before, began = cpu_seconds(pid) if pid else 0.0, time.perf_counter()
    timings = uvloop.run(run_load(port, request, requests=case.requests, connections=case.connections))
    took = time.perf_counter() - began
    cpu = (cpu_seconds(pid) - cpu_before) if pid else None
    # What the client waits for: the whole answer, or the first event of a stream.
    waits = timings.first_byte if case.stream else timings.total
    return {
        "router": contender.name,
        "body": case.body,
        "mode": "stream" if case.stream else "plain",
        "connections": case.connections,
        "cpu_us": cpu / case.requests * 1e6 if cpu is not None else None,
        "p50_us": percentile(waits, 50) * 1e6,
        "p99_us": percentile(waits, 99) * 1e6,
        "requests_per_s": case.requests / took,
    }


def add_differences(results: list[dict[str, Any]]) -> None:
    """Add to each row what it costs over the direct connection under the same load."""
    key = ("body", "mode", "connections")
    direct = {tuple(row[name] for name in key): row for row in results if row["router"] == "direct"}
    for row in results:
        base = direct.get(tuple(row[name] for name in key))
        for figure in ("p50_us", "p99_us"):
            row[f"added_{figure}"] = row[figure] - base[figure] if base is not None and row is not base else None


def targets(results: Sequence[dict[str, Any]]) -> list[Target]:
    """What our router must reach."""

    def value(router: str, figure: str, body: str, connections: int) -> float | None:
        for row in results:
            if (row["router"], row["body"], row["mode"], row["connections"]) == (router, body, "plain", connections):
                found: float | None = row[figure]
                return found
        return None

    out = []
    for index, body in enumerate(("small", "30 KB")):
        for name, limits in CPU_US.items():
            title = f"{name}, {body}, 16 connections: CPU microseconds per request"
            out.append(Target.at_most(title, value(name, "cpu_us", body, 16), limits[index]))
        title = f"vllm-pd whole, {body}, 1 connection: added p50 microseconds"
        out.append(Target.at_most(title, value("vllm-pd whole", "added_p50_us", body, 1), ADDED_P50_US[index]))
    with_blocks, bare = (
        value(name, "cpu_us", "new turn", new_turns.CONNECTIONS) for name in (new_turns.KV, new_turns.BARE)
    )
    more = with_blocks - bare if with_blocks is not None and bare is not None else None
    out.append(Target.at_most("routing by blocks, new turn: CPU microseconds more than bare", more, BY_BLOCKS_US))
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0 when every target was reached, else 1."""
    arguments = parse_arguments("CPU time and added latency of routers", argv)
    plan = cases(arguments.quick)
    report = Report("router_overhead")
    found, notes = contenders()
    report.notes += notes
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        report.notes.append(
            f"other programs were busy (load average {load:.1f} on {cores} cores): figures are too high"
        )
    logs = Path(tempfile.mkdtemp(prefix="router-overhead-"))
    with ExitStack() as stack:
        workers = free_ports(2)
        for port in workers:
            command = [sys.executable, "-m", "benchmarks.mock_upstream", str(port)]
            mock = stack.enter_context(ManagedProcess(ProcessSpec(f"mock-{port}", command, logs / f"mock-{port}.log")))
            mock.wait_ready(f"http://127.0.0.1:{port}/health", deadline_s=START_DEADLINE_S)
        for contender in found:
            progress(f"{contender.name}: {len(plan)} loads")
            try:
                report.results += measure(contender, plan, workers, logs)
            except (ProcessError, LoadError, TimeoutError) as e:
                if contender.name == "direct" or contender.name.startswith("vllm-pd"):
                    raise
                report.notes.append(f"{contender.name} was not measured: {e}")
        progress("new turns")
        report.results += new_turns.measure(
            workers, logs, rounds=6 if arguments.quick else 24, requests=200 if arguments.quick else 400
        )
    add_differences(report.results)
    report.targets = targets(report.results)
    report.show(as_json=arguments.json)
    shutil.rmtree(logs)
    return 0 if all(target.ok for target in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
