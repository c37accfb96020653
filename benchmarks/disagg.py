"""Splitting always, never, or where it is predicted to pay: in the simulator and on real vLLM on this machine's cores.

    python -m benchmarks.disagg                # simulator (two minutes of each workload), then real vLLM; ten minutes
    python -m benchmarks.disagg --quick        # half a minute of each workload, no vLLM
    python -m benchmarks.disagg --simulator    # no vLLM
    python -m benchmarks.disagg --live         # only real vLLM; six minutes, on a machine that does nothing else
    python -m benchmarks.disagg --json

Compared is how long a request takes from its arrival to its last token, the mean of all: everything that a rule can do
to a client is in it, the wait for the first token as well as each stall of a running answer. A rule can have the better
first token or the better gap between tokens by giving up the other, so those two are shown and not judged. `both` is
the same number of workers that all do both, without splitting: shown for comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import disagg_live
from benchmarks.common import Report, Target, parse_arguments, percentile, progress
from benchmarks.disagg_workloads import BLOCK, WORKLOADS, Workload
from vllm_pd.routing.split_rule import split_rule
from vllm_pd.sim.cluster import Cluster, ClusterConfig
from vllm_pd.sim.report import Report as Cell
from vllm_pd.sim.report import summarize
from vllm_pd.sim.work import EngineConfig

OURS = "auto"
RIVALS = ("always", "never")
SHOWN = ("both", "dynamo-old", "dynamo-new")
ENGINE = EngineConfig(block_size=BLOCK, gpu_blocks=65_536)
WORSE = 1.03
"""How much longer requests may take than by the better of the rivals."""
FEWER = 0.97


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0 when every target was reached, else 1."""
    arguments = parse_arguments("Splitting always, never, or where it pays.", argv, ("simulator", "live"))
    if arguments.live and (arguments.quick or arguments.simulator):
        raise SystemExit("--live measures real vLLM, which --quick and --simulator leave out.")
    report = Report("disagg")
    rules = (*RIVALS, OURS) if arguments.quick else (*RIVALS, OURS, *SHOWN)
    if not arguments.live:
        for workload in WORKLOADS:
            progress(f"simulator: {workload.name}")
            simulate(workload, rules, 30.0 if arguments.quick else 120.0, report)
        judge("simulator", report.results, report)
    if not (arguments.quick or arguments.simulator):
        live(report, seconds=8.0, rounds=4)
    report.show(as_json=arguments.json)
    return 0 if all(target.ok for target in report.targets) else 1


def simulate(workload: Workload, rules: Sequence[str], seconds: float, report: Report) -> None:
    """A row for each rule."""
    trace = workload.requests(seconds)
    for rule in rules:
        if rule == "both":
            config = ClusterConfig(workers=workload.prefill + workload.decode, engine=ENGINE)
        else:
            config = ClusterConfig(
                workers=0, prefill=workload.prefill, decode=workload.decode, rule=split_rule(rule), engine=ENGINE
            )
        report.results.append(_row(workload, rule, summarize(Cluster(config).simulate(trace))))


def _row(workload: Workload, rule: str, cell: Cell) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "workers": cell.cluster,
        "rule": rule,
        "split": round(cell.split, 2),
        "ttft_ms": round(cell.ttft_mean, 1),
        "ttft_p99_ms": round(cell.ttft_p99, 1),
        "itl_ms": round(cell.itl_mean, 2),
        "itl_p99_ms": round(cell.itl_p99, 1),
        "request_ms": round(cell.request_mean, 1),
        "tokens_per_s": round(cell.output_tokens_per_s, 1),
    }


def live(report: Report, *, seconds: float, rounds: int) -> None:
    """The rows of real vLLM."""
    found, note = disagg_live.measure((*RIVALS, OURS), seconds, rounds)
    rows = [
        {
            "scene": scene,
            "rule": rule,
            "requests": len(seen.whole),
            "ttft_p50_ms": _percentile_ms(seen.first, 50),
            "ttft_p99_ms": _percentile_ms(seen.first, 99),
            "itl_p50_ms": _percentile_ms(seen.gaps, 50),
            "itl_p99_ms": _percentile_ms(seen.gaps, 99),
            "request_ms": _ms(sum(seen.whole) / len(seen.whole)),
            "tokens_per_s": round(seen.tokens / seen.seconds, 1),
        }
        for (scene, rule), seen in found.items()
    ]
    judge("real vLLM", rows, report)
    report.results += rows
    report.notes.append(note)


def judge(where: str, rows: Sequence[Mapping[str, Any]], report: Report) -> None:
    """The targets: of our rule against the better of the rivals, in the workload in which it does worst."""
    by_workload: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_workload.setdefault(row.get("workload") or row["scene"], {})[row["rule"]] = row
    longer = {
        name: cells[OURS]["request_ms"] / min(cells[rival]["request_ms"] for rival in RIVALS)
        for name, cells in by_workload.items()
    }
    slower = {
        name: cells[OURS]["tokens_per_s"] / max(cells[rival]["tokens_per_s"] for rival in RIVALS)
        for name, cells in by_workload.items()
    }
    worst, least = max(longer, key=longer.__getitem__), min(slower, key=slower.__getitem__)
    report.targets += [
        Target.at_most(f"{where}: request time over better rival's ({worst})", round(longer[worst], 3), WORSE),
        Target.at_least(f"{where}: tokens/s over better rival's ({least})", round(slower[least], 3), FEWER),
    ]
    report.notes += [f"{where}: {_alone(by_workload, figure)}" for figure in ("TTFT", "ITL")]


def _alone(by_workload: Mapping[str, Mapping[str, Mapping[str, Any]]], figure: str) -> str:
    """How one figure does by itself, which no rule can win everywhere."""
    names = ("ttft_ms", "ttft_p50_ms") if figure == "TTFT" else ("itl_p99_ms",)
    ratios: dict[str, float] = {}
    for workload, cells in by_workload.items():
        name = next(name for name in names if name in cells[OURS])
        best = min(cells[rival][name] for rival in RIVALS)
        ratios[workload] = cells[OURS][name] / best if best else 1.0
    above = {workload: ratio for workload, ratio in ratios.items() if ratio > WORSE}
    within = f"{figure} by itself is within 3% of the better rival's in {len(ratios) - len(above)} of {len(ratios)}"
    listed = ", ".join(f"{workload} {ratio:.2f}" for workload, ratio in above.items())
    return f"{within}; not in {listed}" if listed else within


def _percentile_ms(seconds: Sequence[float], percent: float) -> float:
    return _ms(percentile(seconds, percent)) if seconds else 0.0


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


if __name__ == "__main__":
    sys.exit(main())
