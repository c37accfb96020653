"""Choosing a worker: microseconds per decision by number of candidates, with the prompt held by a few of them.

`choose` is a request that goes whole, `plan` one that is split between as many decode and prefill workers, `plan auto`
one that is split if that is predicted to pay.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import Report, Target, parse_arguments, percentile
from vllm_pd.routing.choose import choose
from vllm_pd.routing.ledger import EngineLedger
from vllm_pd.routing.model import Ask, Overlap
from vllm_pd.routing.plan import plan
from vllm_pd.routing.policies import DEFAULT_POLICY, POLICIES
from vllm_pd.routing.rates import RateLearner
from vllm_pd.routing.split_rule import split_rule
from vllm_pd.state.base import PoolId, Role, WorkerId
from vllm_pd.state.block_index import Holder

CANDIDATES = (8, 64, 200)
HOLDING = 4
CANDIDATE_US = 0.5
"""Of `predicted`, for a candidate more."""


def decisions(rounds: int) -> list[dict[str, Any]]:
    """A row for each policy and number of candidates."""
    return [row for count in CANDIDATES for name in POLICIES for row in _rows(name, count, rounds)]


def _rows(name: str, count: int, rounds: int) -> list[dict[str, Any]]:
    chance, learner, policy = random.Random(1), RateLearner(), POLICIES[name]
    engines = [
        EngineLedger(Holder(WorkerId(f"10.0.0.{n}:8000")), PoolId("p"), Role.BOTH, 16_384, learner)
        for n in range(2 * count)
    ]
    for n, engine in enumerate(engines):
        for request in range(chance.randrange(4)):
            engine.begin((n, request), Ask(chance.randrange(100, 8000), 16), Overlap(), 0.0)
    ask = Ask(6144, 16)
    overlaps = {engine.holder: Overlap(chance.randrange(1, 384)) for engine in engines[:HOLDING]}
    whole, other = engines[:count], engines[count:]
    by_time = split_rule("auto")
    timed: dict[str, Callable[[], object]] = {
        "choose": lambda: choose(policy, ask, whole, overlaps, 0.1),
        "plan": lambda: plan(policy, ask, whole, other, overlaps, 0.1),
        "plan auto": lambda: plan(policy, ask, whole, other, overlaps, 0.1, rule=by_time),
    }
    return [{"policy": name, "candidates": count, "what": what, **_time(call, rounds)} for what, call in timed.items()]


def _time(call: Callable[[], object], rounds: int) -> dict[str, float]:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(10):
            call()
        times.append((time.perf_counter() - began) / 10)
    return {"us": min(times) * 1e6, "p50_us": percentile(times, 50) * 1e6}


def targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """What must be reached."""
    took = {row["candidates"]: row["us"] for row in rows if (row["policy"], row["what"]) == (DEFAULT_POLICY, "choose")}
    few, many = min(took), max(took)
    per_candidate = (took[many] - took[few]) / (many - few)
    return [Target.at_most(f"{DEFAULT_POLICY}: microseconds for a candidate more", per_candidate, CANDIDATE_US)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0 when every target was reached, else 1."""
    arguments = parse_arguments("the choice of a worker", argv)
    report = Report("choice")
    report.results = decisions(20 if arguments.quick else 100)
    report.targets = targets(report.results)
    report.show(as_json=arguments.json)
    return 0 if all(target.ok for target in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
