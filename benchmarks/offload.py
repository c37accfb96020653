"""The tiers below GPU memory: how fast, how often they hit, what a hit saves and what a miss costs.

    python -m benchmarks.offload                      # everything
    python -m benchmarks.offload --quick              # under two minutes: the parts that start no servers
    python -m benchmarks.offload --part io --json     # one part; one JSON object on stdout
    python -m benchmarks.offload --part misses --quick    # some four minutes, most of them for servers that start

Parts run one after the other, so that none is measured beside another.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.common import Report, end_in_order, progress

WITHOUT_SERVERS = ("offload_copy", "offload_io", "offload_hits", "offload_admission")
PARTS = (*WITHOUT_SERVERS, "offload_misses", "offload_ttft")
"""Modules here with `NAME: str` and `run(quick: bool) -> tuple[list[dict[str, Any]], list[Target]]`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0 when every target was reached, else 1."""
    names = {part.removeprefix("offload_"): part for part in PARTS}
    parser = argparse.ArgumentParser(description="The tiers below GPU memory: speed, hit rates, what hits save.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument(
        "--quick", action="store_true", help="smaller and fewer; without --part only those that start no servers"
    )
    parser.add_argument(
        "--part", action="append", choices=list(names), help="only this part; can be given several times"
    )
    args = parser.parse_args(argv)
    end_in_order()
    report = Report("offload")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        report.notes.append(
            f"other programs were busy (load average {load:.1f} on {cores} cores): only ratios say something"
        )
    wanted = args.part or [name for name, module in names.items() if not args.quick or module in WITHOUT_SERVERS]
    for name in (name for name in names if name in wanted):
        module = names[name]
        part = importlib.import_module(f"benchmarks.{module}")
        progress(f"{part.NAME}:")
        results, targets = part.run(args.quick)
        report.results += [{"part": name, **row} for row in results]
        report.targets += [replace(target, name=f"{name}: {target.name}") for target in targets]
    report.show(as_json=args.json)
    return 0 if all(target.ok for target in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
