"""`vllm-pd simulate --planner`: the workers of the simulated cluster change as a planner says."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm_pd.console import number_list, positive, print_table
from vllm_pd.errors import SettingsError
from vllm_pd.sim.parallel import run_cells

if TYPE_CHECKING:
    from vllm_pd.planner.model import Plan
    from vllm_pd.sim.cluster import ClusterConfig
    from vllm_pd.sim.planned_config import PlannedConfig
    from vllm_pd.sim.planned_report import PlannedReport
    from vllm_pd.sim.trace import TraceRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("planner (workers that change roles, come and go)")
    group.add_argument(
        "--planner",
        choices=("fixed", "scale"),
        help="fixed: it moves workers between prefill and decode; scale: it also adds and removes them",
    )
    group.add_argument(
        "--planner-rule",
        choices=("sla", "dynamo-load"),
        default="sla",
        help="dynamo-load: by the thresholds of Dynamo's first planner, without role changes in place; "
        "default: %(default)s",
    )
    group.add_argument("--ttft-ms", type=float, default=500.0, metavar="MS", help="target; default: %(default)s")
    group.add_argument(
        "--itl-ms",
        type=float,
        default=50.0,
        metavar="MS",
        help="target, for the mean of a request; default: %(default)s",
    )
    group.add_argument("--min-workers", type=positive, default=2, metavar="N", help="default: %(default)s")
    group.add_argument(
        "--max-workers", type=positive, metavar="N", help="default: as many as there are at the beginning"
    )
    group.add_argument(
        "--cold-start",
        type=number_list(float, zero=True),
        default=[60.0],
        metavar="LIST",
        help="seconds until a new worker serves; default: 60",
    )
    group.add_argument(
        "--start-fails", type=float, default=0.0, metavar="P", help="probability that a new worker never comes up"
    )
    group.add_argument(
        "--lost-per-hour", type=float, default=0.0, metavar="N", help="how often a worker's process dies"
    )
    group.add_argument("--explain", action="store_true", help="print every step that changes something, to stderr")


@dataclass(frozen=True, slots=True)
class _Found:
    report: PlannedReport
    plans: tuple[Plan, ...]


def run(args: argparse.Namespace, trace: Sequence[TraceRequest], configs: Sequence[ClusterConfig]) -> int:
    """Each cluster as it is, and with the planner; returns the exit code."""
    from vllm_pd.sim.planned_report import planned_table

    if args.plot or args.html:
        raise SettingsError("Simulations with --planner are shown as a table or --json; leave out --plot and --html.")
    cells = [cell for config in configs for cell in _cells(args, config)]

    def told(done: int, found: _Found) -> None:
        if args.quiet:
            return
        report = found.report
        cell = f"{report.planner}, {report.cluster} workers, cold start {report.cold_start_s:g} s"
        print(f"{done}/{len(cells)} {cell}: {report.attained:.1%} met both targets", file=sys.stderr, flush=True)
        for plan in found.plans if args.explain else ():
            if plan.actions or plan.give_up:
                print(f"  {plan.at_s:.0f} s: {plan.verdict}", file=sys.stderr, flush=True)

    reports = [found.report for found in run_cells(_simulate, trace, cells, args.jobs, told)]
    if args.json:
        print(json.dumps([report.as_dict() for report in reports]))
    else:
        head, *rows = planned_table(reports)
        print_table(head, rows, figures=True)
        print(
            f"\nTargets: first token within {args.ttft_ms:g} ms, a request's mean time between tokens within "
            f"{args.itl_ms:g} ms. Times are in ms where no unit is given."
        )
    return 0


def _cells(args: argparse.Namespace, cluster: ClusterConfig) -> list[PlannedConfig]:
    from vllm_pd.planner.config import PlannerConfig, Rule
    from vllm_pd.planner.model import Mode
    from vllm_pd.sim.planned_config import Life, PlannedConfig

    rule = Rule(args.planner_rule)
    planner = PlannerConfig(
        mode=Mode(args.planner),
        rule=rule,
        ttft_s=args.ttft_ms / 1000,
        itl_s=args.itl_ms / 1000,
        min_workers=args.min_workers,
        max_workers=args.max_workers or max(len(cluster.roles), args.min_workers),
    )
    life = Life(start_fails=args.start_fails, lost_per_hour=args.lost_per_hour, in_place=rule is not Rule.DYNAMO_LOAD)
    cells = [
        PlannedConfig(cluster, planner, planner.ttft_s, planner.itl_s, replace(life, cold_start=cold_start))
        for cold_start in args.cold_start
    ]
    return [replace(cells[0], planner=None), *cells]


def _simulate(trace: Sequence[TraceRequest], config: PlannedConfig) -> _Found:
    from vllm_pd.sim.planned import PlannedCluster
    from vllm_pd.sim.planned_report import summarize_planned

    planned = PlannedCluster(config).simulate_planned(trace)
    return _Found(summarize_planned(planned), tuple(planned.plans))
