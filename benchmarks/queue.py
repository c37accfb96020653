"""The prefill queue: what it adds to the time to first token, how many jobs it passes on, how it gets over a kill.

    python -m benchmarks.queue             # about two minutes
    python -m benchmarks.queue --quick     # about one
    python -m benchmarks.queue --json      # one JSON object on stdout

Mock workers, which compute nothing, and a real store, router and network (loopback).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from benchmarks import queue_rate, queue_recovery, queue_ttft
from benchmarks.common import Report, Target, parse_arguments

ADDED_MS = 3.0
RECOVERY_S = 15.0
"""After its lease (ten seconds) a worker's jobs go to others even if nothing else has told that it is gone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0 when every target was reached, else 1."""
    args = parse_arguments("The prefill queue: added TTFT, jobs a second, time to recover after a kill.", argv)
    report = Report("queue")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        report.notes.append(f"other programs were busy (load average {load:.1f} on {cores} cores): times are too long")
    plan = queue_ttft.Plan(100, 3, 100) if args.quick else queue_ttft.Plan(400, 6, 200)
    rows, added_ms = queue_ttft.measure(plan)
    report.results += rows
    report.targets.append(Target.at_most("TTFT added by the queue, p50 ms", round(added_ms, 3), ADDED_MS))
    report.results += queue_rate.measure(2000 if args.quick else 8000, (16, 500))
    rows = queue_recovery.measure()
    report.results += rows
    failed = sum(row["failed"] for row in rows)
    report.targets.append(Target.at_most("requests that failed when a prefill worker was killed", failed, 0))
    for row in rows:
        if (after := row["given to others after s"]) is not None:
            name = f"seconds until others have its jobs, {row['prefill worker']}"
            report.targets.append(Target.at_most(name, round(after, 2), RECOVERY_S))
    report.show(as_json=args.json)
    return 0 if all(target.ok for target in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
