"""Routing policies on public traces, in the simulator: 4 and 16 workers, arrivals as recorded and twice as fast.

The traces are Mooncake's (FAST'25), `conversation_trace.jsonl` and `synthetic_trace.jsonl`: put them into one folder
and name it, or have them in `../shared/traces`. Every cell is a whole trace, run until its last request has ended.
Ours is the policy `predicted`; the others see the same index, load reports and requests in progress.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import Report, Target, progress
from vllm_pd.routing.policies import POLICIES
from vllm_pd.sim import cluster
from vllm_pd.sim.cli import simulate
from vllm_pd.sim.floor import floor
from vllm_pd.sim.report import Report as Cell
from vllm_pd.sim.trace import SOURCE, read_trace

OURS = "predicted"
TRACES = ("conversation", "synthetic")
WORKERS = (4, 16)
SPEEDS = (1.0, 2.0)
DEFAULT_FOLDER = Path("../shared/traces")
GAIN = 0.15
"""By which the mean TTFT must be under the best of the others, on average over the cells."""
SHARE = 1.5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument(
        "--traces", type=Path, default=DEFAULT_FOLDER, help="folder of the traces (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests of each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args(argv)
    paths = {name: args.traces / f"{name}_trace.jsonl" for name in TRACES}
    missing = [str(path) for path in paths.values() if not path.is_file()]
    if missing:
        print(
            f"{', '.join(missing)} not found; get Mooncake's traces from {SOURCE} and name their folder with --traces.",
            file=sys.stderr,
        )
        return 2
    report = Report("simulation")
    gains: list[float] = []
    for name, path in paths.items():
        trace = read_trace(path, limit=args.limit)
        configs = [
            cluster.ClusterConfig(policy=policy, workers=workers, speed=speed)
            for workers, speed, policy in itertools.product(WORKERS, SPEEDS, POLICIES)
        ]
        cells = simulate(trace, configs, args.jobs, _tell)
        least = floor(trace, configs[0].timing, configs[0].engine)
        report.notes.append(
            f"{name}: every request alone on a worker that holds all earlier prompts would have a mean TTFT of "
            f"{least.ttft_mean:.0f} ms, p99 {least.ttft_p99:.0f} ms, {least.hits:.1%} hits"
        )
        report.results += [_row(name, cell) for cell in cells]
        for (workers, speed), group in itertools.groupby(cells, lambda cell: (cell.cluster, cell.speed)):
            here = {cell.policy: cell for cell in group}
            gains.append(_compare(f"{name}, {workers} workers, x{speed:g}", here, report))
    mean = sum(gains) / len(gains)
    report.targets.append(
        Target("mean TTFT under the best other, average of cells", round(mean, 3), GAIN, mean >= GAIN)
    )
    report.show(as_json=args.json)
    return 0 if all(target.ok for target in report.targets) else 1


def _tell(done: int, cell: Cell) -> None:
    progress(f"{done}: {cell.policy}, {cell.cluster} workers, x{cell.speed:g}")


def _row(trace: str, cell: Cell) -> dict[str, object]:
    return {
        "trace": trace,
        "workers": cell.cluster,
        "speed": f"x{cell.speed:g}",
        "policy": cell.policy,
        "ttft_mean_ms": round(cell.ttft_mean),
        "ttft_p50_ms": round(cell.ttft_p50),
        "ttft_p99_ms": round(cell.ttft_p99),
        "itl_mean_ms": round(cell.itl_mean, 1),
        "hit": round(cell.hits, 3),
        "share_max": round(cell.share_max, 2),
        "busy_max": round(cell.busy_max, 2),
        "unfinished": cell.unfinished + cell.refused,
    }


def _compare(where: str, cells: Mapping[str, Cell], report: Report) -> float:
    """Add a cell's targets; returns by which part our mean is under the best of the others."""
    ours = cells[OURS]
    others = [cell for cell in cells.values() if cell is not ours]
    mean = min(cell.ttft_mean for cell in others)
    p99 = min(cell.ttft_p99 for cell in others)
    report.targets += [
        Target.at_most(f"{where}: mean TTFT, ms, and best other", round(ours.ttft_mean, 1), round(mean, 1)),
        Target.at_most(f"{where}: p99 TTFT, ms, and best other", round(ours.ttft_p99, 1), round(p99, 1)),
        Target.at_most(f"{where}: largest share of requests", round(ours.share_max, 2), SHARE),
    ]
    return 1 - ours.ttft_mean / mean


if __name__ == "__main__":
    sys.exit(main())
