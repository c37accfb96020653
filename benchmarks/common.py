"""What every benchmark shares: the machine it ran on, percentiles, targets, and one way to show results.

With `--json` a benchmark prints one object and nothing else on stdout:
`{"name", "machine", "results": [...], "targets": [{"name", "value", "target", "ok"}]}`. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that a benchmark must reach, and whether it did. `value` is None when it could not be measured."""

    name: str
    value: float | None
    target: float
    ok: bool

    @classmethod
    def at_most(cls, name: str, value: float | None, limit: float) -> Target:
        """Reached when `value` is not above `limit`."""
        return cls(name, value, limit, value is not None and value <= limit)

    @classmethod
    def at_least(cls, name: str, value: float | None, limit: float) -> Target:
        """Reached when `value` is not below `limit`."""
        return cls(name, value, limit, value is not None and value >= limit)


@dataclass(slots=True)
class Report:
    """Results of one benchmark; `notes` say what was left out and why."""

    name: str
    results: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def show(self, *, as_json: bool) -> None:
        """Print it to stdout, as one JSON object or as tables."""
        if as_json:
            value: dict[str, Any] = {
                "name": self.name,
                "machine": machine(),
                "results": self.results,
                "targets": [asdict(target) for target in self.targets],
            }
            if self.notes:
                value["notes"] = self.notes
            print(json.dumps(value))
            return
        about = machine()
        print(f"{self.name} on {about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB\n")
        # Rows of the same kind are one table.
        print("\n\n".join(table(list(rows)) for _, rows in groupby(self.results, key=tuple)))
        for note in self.notes:
            print(f"note: {note}")
        if self.targets:
            print()
            print(table([asdict(target) for target in self.targets]))


def machine() -> dict[str, Any]:
    """The machine in words and numbers. `cores` are those that this process may use."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def end_in_order() -> None:
    """Have SIGTERM end this process as Ctrl-C does: servers that it started are ended and files removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def scratch_folder() -> Path:
    """For files and logs of a run, on the disk of the current folder: the one for temporary files may be memory."""
    folder = Path(".cache", "benchmarks").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of a non-empty sequence, `percent` from 0 to 100."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """What holds, in 95 of 100 cases, the median of what these few are a sample of: two of their order statistics.

    Of fewer than six it is their range, which holds it less often.
    """
    ordered = sorted(values)
    below = max(0, int((len(ordered) - 1.96 * len(ordered) ** 0.5) / 2))
    return ordered[below], ordered[-1 - below]


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used, all its threads together, those that have ended included.

    Raises:
        OSError: there is no such process.
    """
    # Linux' number of that clock (`clock_getcpuclockid`): nanoseconds, where /proc/PID/stat counts ticks of 10 ms.
    return time.clock_gettime(~pid << 3 | 2)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with equal keys as text, numbers to the right."""
    if not rows:
        return "(nothing)"
    names = list(rows[0])
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    numeric = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in names]

    def line(values: Sequence[str]) -> str:
        padded = (
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(cells[0]), line(["-" * width for width in widths]), *(line(row) for row in cells[1:])])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:.1f}"
        if isinstance(value, float) and abs(value) >= 10
        else f"{value:.3g}"
        if isinstance(value, float)
        else str(value)
    )


def progress(message: str) -> None:
    """One line to stderr."""
    print(message, file=sys.stderr, flush=True)


def parse_arguments(description: str, argv: Sequence[str] | None, extra: Iterable[str] = ()) -> argparse.Namespace:
    """The flags that every benchmark has: `--json` and `--quick`. `extra` are names of further on/off flags.

    From then on SIGTERM ends the benchmark in order.
    """
    end_in_order()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer requests, under two minutes")
    for name in extra:
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv)
