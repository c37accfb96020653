"""Time to first token through prefill and decode, against one plain server, in the same run.

    python -m benchmarks.pd_ttft                  # tiny model and SmolLM2, about six minutes on two cores
    python -m benchmarks.pd_ttft --quick          # tiny model only, under two minutes
    python -m benchmarks.pd_ttft --json           # one JSON object on stdout

Three servers run side by side: a prefill and a decode worker behind a router, and a plain `vllm serve`, each on one
core. Every prompt is new (no cache hit anywhere) and is asked of both, in alternating order; a streamed request is
timed from the moment it is sent to its first token. The ratio is the median over the pairs, so that a machine that
drifts drifts for both. The first hand-off between two workers, which sets up the connection, is a warm-up and is
reported apart.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
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
    rng = random.Random(7)
    with LocalCluster(
        model=model, prefill=1, decode=1, plain=1, max_model_len=2048, kv_blocks=128,
        worker_args=("--served-model-name", MODEL),
    ) as cluster:  # fmt: skip
        plain, ours = cluster.of_role(None)[0].url, cluster.router_url
        first = time_to_first_token(ours, prompt(rng, max(case.lengths)))
        for _ in range(2):
            time_to_first_token(ours, prompt(rng, max(case.lengths)))
            time_to_first_token(plain, prompt(rng, max(case.lengths)))
        decode = cluster.worker("decode-0")
        for length in case.lengths:
            progress(f"{case.name}: {length} tokens")
            computed = decode.metrics().value("vllm:prompt_tokens_by_source_total", source="local_compute")
            pairs = [pair(plain, ours, prompt(rng, length), swap=n % 2 == 1) for n in range(case.pairs)]
            computed = decode.metrics().value("vllm:prompt_tokens_by_source_total", source="local_compute") - computed
            alone, split = [p[0] for p in pairs], [p[1] for p in pairs]
            ratio = statistics.median(b / a for a, b in pairs)
            report.results.append(
                {
                    "model": case.name,
                    "tokens": length,
                    "pairs": case.pairs,
                    "plain p50 ms": round(statistics.median(alone) * 1e3, 1),
                    "P/D p50 ms": round(statistics.median(split) * 1e3, 1),
                    "P/D max ms": round(max(split) * 1e3, 1),
                    "ratio p50": round(ratio, 3),
                    "first ever ms": round(first * 1e3, 1),
                    "computed by decode": int(computed),
                }
            )
            if length == TARGET_TOKENS:
                report.targets.append(
                    Target.at_most(f"{case.name}: TTFT ratio at {length} tokens", round(ratio, 3), case.target)
                )


def pair(plain: str, ours: str, ids: list[int], *, swap: bool) -> tuple[float, float]:
    """(plain, P/D) seconds for one prompt, asked of P/D first if `swap`."""
    if swap:
        split = time_to_first_token(ours, ids)
        return time_to_first_token(plain, ids), split
    return time_to_first_token(plain, ids), time_to_first_token(ours, ids)


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
