"""Time to first token through prefill and decode, against one plain server, in the same run.

    python -m benchmarks.pd_ttft                  # tiny model and SmolLM2, about six minutes on two cores
    python -m benchmarks.pd_ttft --quick          # tiny model only, under two minutes
    python -m benchmarks.pd_ttft --json           # one JSON object on stdout

A prefill and a decode worker behind a router, and a plain `vllm serve`, are all up, each model bound to one core. Idle
vLLM servers poll, which on two cores slows whoever is measured, so those that are not asked are stopped (SIGSTOP)
meanwhile. Every prompt is new (no cache hit anywhere) and is asked of both sides, in rounds that alternate; a streamed
request is timed from the moment it is sent to its first token. The ratio is the median over the pairs, so that a
machine that drifts drifts for both. The first hand-off between two workers, which sets up the connection, is reported
apart.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.common import Report, Target, parse_arguments, progress
from scripts.models import smollm2_dir, tiny_model_dir
from vllm_pd.graph.local import LocalCluster

MODEL = "m"
REQUEST_DEADLINE_S = 120.0
VOCABULARY = range(300, 2000)
TARGET_TOKENS = 1500
ROUND = 5
"""Prompts asked of one side before the other's turn."""
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """One model: at which prompt lengths (tokens) it is asked how many pairs, and the target of the longest."""

    name: str
    lengths: tuple[int, ...]
    pairs: int
    target: float


TINY = Case("tiny", (500, 1500), 15, 1.35)
SMOLLM2 = Case("SmolLM2-135M", (500, 1500), 7, 1.10)
QUICK = Case("tiny", (1500,), 10, 1.35)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0 when every target was reached, else 1."""
    args = parse_arguments("Time to first token through prefill and decode, against one plain server.", argv)
    report = Report("pd_ttft")
    for case in (QUICK,) if args.quick else (TINY, SMOLLM2):
        progress(f"{case.name}: preparing the model")
        run(case, tiny_model_dir() if case.name == "tiny" else smollm2_dir(), report)
    report.show(as_json=args.json)
    return 0 if all(target.ok for target in report.targets) else 1


def run(case: Case, model: Path, report: Report) -> None:
    """Start the servers, measure, and add rows and a target to the report."""
    progress(f"{case.name}: starting three vLLM servers")
    with LocalCluster(
        model=model, prefill=1, decode=1, plain=1, max_model_len=2048, kv_blocks=128,
        worker_args=("--served-model-name", MODEL), env={"VLLM_PD_LEASE_S": "600"}, router_args=("--disagg", "always"),
    ) as cluster:  # fmt: skip
        plain, decode = cluster.of_role(None)[0], cluster.worker("decode-0")
        split = [cluster.worker("prefill-0").process.pid, decode.process.pid]
        sides = (Side(plain.url, [plain.process.pid]), Side(cluster.router_url, split))
        with ExitStack() as at_the_end:
            for side in sides:
                side.pause()
                at_the_end.callback(side.wake)
            measure(case, *sides, report)
        own = decode.metrics().value("vllm:prompt_tokens_by_source_total", source="local_compute")
        report.notes.append(f"{case.name}: the decode worker computed {int(own)} prompt tokens itself in all.")


def measure(case: Case, plain: Side, split: Side, report: Report) -> None:
    """Ask both sides the same new prompts, in rounds."""
    rng = random.Random(7)
    longest = max(case.lengths)
    first = [side.ask([prompt(rng, longest) for _ in range(4)]) for side in (plain, split)][1][0]
    for length in case.lengths:
        progress(f"{case.name}: {length} tokens")
        alone: list[float] = []
        both: list[float] = []
        for start in range(0, case.pairs, ROUND):
            prompts = [prompt(rng, length) for _ in range(min(ROUND, case.pairs - start))]
            alone += plain.ask(prompts)
            both += split.ask(prompts)
        ratio = round(statistics.median(b / a for a, b in zip(alone, both, strict=True)), 3)
        report.results.append(
            {
                "model": case.name,
                "tokens": length,
                "pairs": case.pairs,
                "plain p50 ms": _ms(statistics.median(alone)),
                "plain max ms": _ms(max(alone)),
                "P/D p50 ms": _ms(statistics.median(both)),
                "P/D max ms": _ms(max(both)),
                "ratio p50": ratio,
                "first ever P/D ms": _ms(first),
            }
        )
        if length == TARGET_TOKENS:
            report.targets.append(Target.at_most(f"{case.name}: TTFT ratio at {length} tokens", ratio, case.target))


class Side:
    """An endpoint and the servers behind it, which are stopped while another side is measured.

    Args:
        groups: process groups of the servers, by leader.
    """

    def __init__(self, url: str, groups: Sequence[int]) -> None:
        self._url = url
        self._groups = groups

    def ask(self, prompts: Sequence[list[int]]) -> list[float]:
        """Seconds to the first token of each prompt, one after the other."""
        self.wake()
        # A moment to catch up with their clocks.
        time.sleep(SETTLE_S)
        try:
            return [time_to_first_token(self._url, ids) for ids in prompts]
        finally:
            self.pause()

    def pause(self) -> None:
        """Stop them where they are."""
        self._send(signal.SIGSTOP)

    def wake(self) -> None:
        """Let them go on."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for group in self._groups:
            os.killpg(group, number)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.choice(VOCABULARY) for _ in range(tokens)]


def time_to_first_token(url: str, ids: list[int]) -> float:
    """Seconds from sending a streamed request to its first token. The rest of the answer is read, not timed."""
    body = {"model": MODEL, "prompt": ids, "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=REQUEST_DEADLINE_S)
    try:
        connection.connect()
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}: {response.read(500).decode(errors='replace')}")
        for line in response:
            if line.startswith(b"data: {"):
                elapsed = time.perf_counter() - started
                response.read()
                return elapsed
    finally:
        connection.close()
    raise SystemExit(f"{url} ended its stream without a token.")


if __name__ == "__main__":
    sys.exit(main())
