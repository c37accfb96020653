"""The planner in the simulator: an hour of 16 workers against every fixed split and Dynamo's load rule.

    python -m benchmarks.planner                        # all workloads; some eight minutes on two cores
    python -m benchmarks.planner --quick                # sinusoid and one trace, fewer splits; under two minutes
    python -m benchmarks.planner --json
    python -m benchmarks.planner --workloads sinusoid,step --cold-starts 60 --only sla
    python -m benchmarks.planner --workloads sinusoid,step,spike --seed 1   # other arrivals by the same rates
    python -m benchmarks.planner --workloads sinusoid --only sla --explain     # every step of the planner that acts
    python -m benchmarks.planner --workloads "long sinusoid"    # three hours, in which what returns can be learned

Attainment is the fraction of all requests (those turned away, lost or never ended included) whose first token came
within the TTFT target and whose tokens came, on average, within the ITL target. GPU hours count each worker from the
moment it was asked for until it was gone. Roles change in place, except by Dynamo's rule: there a worker drains, is
stopped and started cold in the new role. `the same with foresight` is the planner's rule with what will come in place
of its guess: how far a better forecast could bring it. The traces are Mooncake's, as for `benchmarks.simulation`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Report, Target, progress
from benchmarks.planner_foresight import knowing
from benchmarks.planner_workloads import ON_REQUEST, WORKLOADS, Workload
from vllm_pd.planner.config import PlannerConfig, Rule
from vllm_pd.planner.model import Mode, Plan
from vllm_pd.routing.split_rule import split_rule
from vllm_pd.sim.cluster import ClusterConfig
from vllm_pd.sim.parallel import run_cells
from vllm_pd.sim.planned import PlannedCluster
from vllm_pd.sim.planned_config import Life, PlannedConfig
from vllm_pd.sim.planned_report import PlannedReport, summarize_planned
from vllm_pd.sim.trace import SOURCE, TraceRequest

WORKERS = 16
COLD_STARTS = (10.0, 60.0, 300.0)
USUAL_START = 60.0
MOVE_TIMEOUT = 60.0
"""Seconds. An answer of the made-up workloads takes two minutes, and not every stream can be handed over."""
FEWER = 0.8
"""GPU hours of the best split that the planner may use where it scales."""
DEFAULT_FOLDER = Path("../shared/traces")
QUICK = ("sinusoid", "synthetic trace")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: `static` with a split, or a rule in a mode."""

    workload: Workload
    name: str
    prefill: int = WORKERS // 2
    both: bool = False
    mode: Mode | None = None
    rule: Rule = Rule.SLA
    cold_start: float = USUAL_START
    knows: bool = False
    """Whether it is told what will come: no planner, but what no planner can do better than by much."""

    def config(self) -> PlannedConfig:
        workload = self.workload
        cluster = ClusterConfig(
            workers=WORKERS if self.both else 0,
            prefill=0 if self.both else self.prefill,
            decode=0 if self.both else WORKERS - self.prefill,
            rule=split_rule("auto"),
            speed=workload.speed,
            engine=workload.engine,
            timing=workload.timing,
        )
        planner = None
        if self.mode is not None:
            planner = PlannerConfig(
                mode=self.mode,
                rule=self.rule,
                ttft_s=workload.ttft_s,
                itl_s=workload.itl_s,
                attainment=workload.attainment,
                min_workers=2,
                max_workers=WORKERS,
            )
        life = Life(cold_start=self.cold_start, move_timeout=MOVE_TIMEOUT, in_place=self.rule is not Rule.DYNAMO_LOAD)
        return PlannedConfig(cluster, planner, workload.ttft_s, workload.itl_s, life)


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a cell."""

    report: PlannedReport
    plans: tuple[Plan, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0 when every target was reached, 1 when not, 2 for what cannot be run."""
    args = _arguments(argv)
    there = (*WORKLOADS, *ON_REQUEST)
    names = [workload.name for workload in there]
    wanted = args.workloads or (QUICK if args.quick else [workload.name for workload in WORKLOADS])
    unknown = [name for name in wanted if name not in names]
    if unknown:
        print(f"There is no workload {', '.join(unknown)}; choose from {', '.join(names)}.", file=sys.stderr)
        return 2
    workloads = [workload for workload in there if workload.name in wanted]
    missing = [
        str(path)
        for workload in workloads
        if workload.trace and not (path := args.traces / f"{workload.trace}_trace.jsonl").is_file()
    ]
    if missing:
        print(
            f"{', '.join(missing)} not found; get Mooncake's traces from {SOURCE} and name their folder with --traces.",
            file=sys.stderr,
        )
        return 2
    report = Report("planner")
    for workload in workloads:
        starts = args.cold_starts or ((USUAL_START,) if args.quick else COLD_STARTS)
        cells = _cells(workload, starts, quick=args.quick, only=args.only)
        trace = workload.requests(args.traces, args.seed)
        progress(f"{workload.name}: {len(trace)} requests, {len(cells)} runs")
        found = dict(zip(cells, run_cells(_run, trace, cells, args.jobs, _tell), strict=True))
        if args.explain:
            _explain(found)
        report.results += [_row(cell, each.report) for cell, each in found.items()]
        _judge(workload, {cell: each.report for cell, each in found.items()}, report)
    report.show(as_json=args.json)
    return 0 if all(target.ok for target in report.targets) else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer runs, under two minutes")
    parser.add_argument("--workloads", type=lambda text: text.split(","), metavar="LIST", help="only these")
    parser.add_argument(
        "--cold-starts", type=lambda text: tuple(map(float, text.split(","))), metavar="LIST", help="only these, s"
    )
    parser.add_argument("--only", choices=("static", *Rule), help="only the fixed splits, or one rule")
    parser.add_argument("--seed", type=int, default=0, help="of the made-up workloads' arrivals (default: %(default)s)")
    parser.add_argument("--explain", action="store_true", help="print the plans that do something to stderr")
    parser.add_argument(
        "--traces", type=Path, default=DEFAULT_FOLDER, help="folder of the traces (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    return parser.parse_args(argv)


def _cells(workload: Workload, starts: Sequence[float], *, quick: bool, only: str | None) -> list[Cell]:
    cells: list[Cell] = []
    if only in (None, "static"):
        splits = range(4, WORKERS - 2, 2) if quick else range(1, WORKERS)
        cells += [Cell(workload, f"{split}P+{WORKERS - split}D", split) for split in splits]
        if not quick:
            cells.append(Cell(workload, f"{WORKERS} both", both=True))
    if only in (None, Rule.SLA):
        cells.append(Cell(workload, "planner, fixed total", mode=Mode.FIXED))
        cells += [Cell(workload, "planner, scaling", mode=Mode.SCALE, cold_start=start) for start in starts]
        if workload.shifts and not quick:
            name = "the same with foresight"
            cells += [Cell(workload, name, mode=Mode.SCALE, cold_start=start, knows=True) for start in starts]
    if only in (None, Rule.DYNAMO_LOAD):
        rule = Rule.DYNAMO_LOAD
        if not quick:
            cells.append(Cell(workload, "Dynamo's rule, fixed total", mode=Mode.FIXED, rule=rule))
        cells += [Cell(workload, "Dynamo's rule, scaling", mode=Mode.SCALE, rule=rule, cold_start=s) for s in starts]
    return cells


def _run(trace: Sequence[TraceRequest], cell: Cell) -> Found:
    if cell.knows:
        enough = replace(cell, mode=Mode.FIXED).config()
        cluster = knowing(cell.config(), enough, trace)
    else:
        cluster = PlannedCluster(cell.config())
    planned = cluster.simulate_planned(trace)
    return Found(summarize_planned(planned), tuple(planned.plans))


def _tell(done: int, found: Found) -> None:
    report = found.report
    progress(f"  {done}: {report.planner}, {report.cluster}: {report.attained:.1%} in {report.gpu_hours:.1f} GPU hours")


def _explain(found: Mapping[Cell, Found]) -> None:
    for cell, each in found.items():
        where = f"  {cell.workload.name}, {cell.name}, {cell.cold_start:g} s"
        for plan in each.plans:
            if plan.actions or plan.give_up:
                progress(f"{where}: {plan.at_s:.0f} s: {plan.verdict}")


def _row(cell: Cell, report: PlannedReport) -> dict[str, Any]:
    return {
        "workload": cell.workload.name,
        "workers": cell.name,
        "cold_start_s": cell.cold_start if cell.mode is not None else None,
        "attained": round(report.attained, 4),
        "ttft": round(report.ttft_attained, 4),
        "itl": round(report.itl_attained, 4),
        "ttft_p50_ms": round(report.ttft_p50),
        "ttft_p99_ms": round(report.ttft_p99),
        "itl_p99_ms": round(report.itl_p99, 1),
        "gpu_hours": round(report.gpu_hours, 2),
        "moves_per_hour": round(report.moves_per_hour, 1),
        "move_s": round(report.move_mean_s, 1),
        "undone": report.undone,
        "started": report.starts,
        "removed": report.removed,
        "missed": report.arrivals - report.ended,
    }


def _judge(workload: Workload, found: Mapping[Cell, PlannedReport], report: Report) -> None:
    static = {cell: each for cell, each in found.items() if cell.mode is None}
    planned = {cell: each for cell, each in found.items() if cell.mode is not None and not cell.knows}
    ours = {cell: each for cell, each in planned.items() if cell.rule is Rule.SLA}
    if not static or not ours:
        return
    best = max(static, key=lambda cell: static[cell].attained)
    attained, hours = static[best].attained, static[best].gpu_hours
    report.notes.append(f"{workload.name}: the best fixed split is {best.name} with {attained:.1%}")
    for cell, each in ours.items():
        where = f"{workload.name}, {cell.name}"
        if cell.mode is Mode.FIXED:
            if workload.shifts:
                report.targets.append(
                    Target.at_least(f"{where}: attained, and best split", round(each.attained, 4), round(attained, 4))
                )
            continue
        if workload.sudden:
            continue
        where += f", cold start {cell.cold_start:g} s"
        report.targets += [
            Target.at_least(f"{where}: attained, and best split", round(each.attained, 4), round(attained, 4)),
            Target.at_most(f"{where}: GPU hours over best split's", round(each.gpu_hours / hours, 3), FEWER),
        ]


if __name__ == "__main__":
    sys.exit(main())
