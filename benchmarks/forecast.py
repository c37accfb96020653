"""How well and how dearly arrivals are forecast: the planner's own way, moving averages, and libraries.

    python -m benchmarks.forecast                 # what is installed of statsmodels and statsforecast takes part
    python -m benchmarks.forecast --series sinusoid,step --every 1 --json

The series are what the workloads of `benchmarks.planner` bring in each ten seconds, in requests, and one whose load
returns every 25 minutes for four hours. From each minute on it is guessed what arrives in 10, 60 and 300 s, with no
look ahead; what came is the mean of the 40 s from then on. The error is the root mean square over the series' mean.
The methods with `season` are told the period of 25 minutes, which nobody tells a planner: it looks for one.

Libraries are no part of vllm-pd: `pip install --target DIR statsmodels statsforecast`, then PYTHONPATH=DIR.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Report, progress
from benchmarks.planner import DEFAULT_FOLDER
from benchmarks.planner_workloads import SINUSOID, WORKLOADS, Workload, wave
from vllm_pd.planner.forecast import best_guesses, forecasts
from vllm_pd.planner.long_history import remembered
from vllm_pd.planner.memory import Buckets, Sample
from vllm_pd.sim.trace import SOURCE

BIN_S = 10.0
HORIZONS_S = (10.0, 60.0, 300.0)
STEPS = tuple(round(seconds / BIN_S) for seconds in HORIZONS_S)
JUDGED_BY = 4
"""Bins whose mean a guess is compared with."""
FIRST = 30
"""Bins that are known before the first guess."""
OWN_WINDOW = 120
"""Bins that the planner remembers."""
PERIOD_S = 1500.0
SEASON = round(PERIOD_S / BIN_S)

RETURNING = replace(
    SINUSOID,
    name="returning",
    seconds=14_400.0,
    reading=lambda at: 0.7 * (1.0 + 0.5 * wave(at, PERIOD_S)),
    writing=lambda at: 0.9 * (1.0 + 0.5 * wave(at, PERIOD_S)),
)
SERIES = (*WORKLOADS, RETURNING)


@dataclass(frozen=True, slots=True)
class Method:
    """A way to guess: values so far in, one guess for each of `STEPS` out."""

    name: str
    guess: Callable[[Sequence[float]], Sequence[float]]
    library: str = ""
    window: int = 360
    """Bins that it is given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0, or 2 for what cannot be run."""
    args = _arguments(argv)
    names = [workload.name for workload in SERIES]
    wanted = args.series or names
    unknown = [name for name in wanted if name not in names]
    if unknown:
        print(f"There is no series {', '.join(unknown)}; choose from {', '.join(names)}.", file=sys.stderr)
        return 2
    report = Report("forecast")
    methods = []
    for method in METHODS:
        if method.library and importlib.util.find_spec(method.library) is None:
            report.notes.append(f"{method.name}: {method.library} is not installed")
        else:
            methods.append(method)
    for workload in (workload for workload in SERIES if workload.name in wanted):
        path = args.traces / f"{workload.trace}_trace.jsonl"
        if workload.trace and not path.is_file():
            report.notes.append(f"{workload.name}: {path} not found; get Mooncake's traces from {SOURCE}")
            continue
        values = series(workload, args.traces)
        progress(f"{workload.name}: {len(values)} times {BIN_S:g} s")
        report.results += [judged(workload.name, values, method, args.every) for method in methods]
    report.results += [_weight(name) for name in dict.fromkeys(method.library for method in methods) if name]
    report.show(as_json=args.json)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.forecast",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--series", type=lambda text: text.split(","), metavar="LIST", help="only these")
    parser.add_argument(
        "--every", type=int, default=6, metavar="N", help="guess at each Nth bin (default: %(default)s)"
    )
    parser.add_argument(
        "--traces", type=Path, default=DEFAULT_FOLDER, help="folder of the traces (default: %(default)s)"
    )
    return parser.parse_args(argv)


def series(workload: Workload, traces: Path) -> list[float]:
    """Requests a second, in each bin."""
    times = [request.at / workload.speed for request in workload.requests(traces)]
    counts = [0] * (int(times[-1] / BIN_S) + 1)
    for at in times:
        counts[int(at / BIN_S)] += 1
    # The last one is not whole.
    return [count / BIN_S for count in counts[:-1]]


def judged(name: str, values: Sequence[float], method: Method, every: int) -> dict[str, Any]:
    squares, judged = [0.0] * len(STEPS), [0] * len(STEPS)
    seconds, guesses = 0.0, 0
    method.guess(values[:FIRST])  # What is compiled or loaded at the first call is no part of a step.
    for known in range(FIRST, len(values) - JUDGED_BY + 1, every):
        began = time.process_time()
        found = method.guess(values[max(0, known - method.window) : known])
        seconds += time.process_time() - began
        guesses += 1
        for index, steps in enumerate(STEPS):
            # The last that is known is one bin old when the next has come.
            came = values[known - 1 + steps : known - 1 + steps + JUDGED_BY]
            if len(came) == JUDGED_BY:
                squares[index] += (found[index] - sum(came) / JUDGED_BY) ** 2
                judged[index] += 1
    mean = sum(values) / len(values)
    row: dict[str, Any] = {"series": name, "method": method.name}
    for horizon, square, count in zip(HORIZONS_S, squares, judged, strict=True):
        row[f"error_{horizon:g}_s"] = round(math.sqrt(square / count) / mean, 3) if count else None
    row["cpu_ms_a_step"] = round(seconds / guesses * 1000, 2) if guesses else None
    return row


def _weight(library: str) -> dict[str, Any]:
    """What the import of a library costs a fresh process."""
    code = (
        "import os, pathlib, time; "
        "held = lambda: int(pathlib.Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE'); "
        "began, before = time.process_time(), held(); "
        f"import {_MODULES[library]}; "
        "print(time.process_time() - began, (held() - before) / 2**20)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    cpu_s, mib = map(float, ended.stdout.split())
    return {"import": library, "cpu_s": round(cpu_s, 2), "memory_mib": round(mib)}


_MODULES = {"statsmodels": "statsmodels.tsa.holtwinters", "statsforecast": "statsforecast.models"}


# The methods.


def _mean_of(count: int) -> Callable[[Sequence[float]], Sequence[float]]:
    def guess(values: Sequence[float]) -> Sequence[float]:
        lately = values[-count:]
        return [sum(lately) / len(lately)] * len(STEPS)

    return guess


def _own(values: Sequence[float]) -> Sequence[float]:
    # A guess for n samples after the last that is known.
    return [guess.value for guess in best_guesses(values, STEPS)]


class _Returning:
    """The planner's way with what it learns of what returns, in the values that it was given one after the other."""

    def __init__(self) -> None:
        self._ages: tuple[Buckets, ...] = ()
        self._known = 0

    def __call__(self, values: Sequence[float]) -> Sequence[float]:
        if len(values) < self._known:
            self._ages, self._known = (), 0
        samples = [Sample(BIN_S, value, value, value, value) for value in values]
        for number in range(self._known, len(samples)):
            self._ages = remembered(self._ages, samples[number], (number + 1) * BIN_S)
        self._known = len(samples)
        found = forecasts(samples[-OWN_WINDOW:], HORIZONS_S, ages=self._ages, at_s=len(samples) * BIN_S)
        return [each.demand.arrivals for each in found]


def _at_steps(future: Sequence[float]) -> list[float]:
    return [max(0.0, float(future[steps - 1])) for steps in STEPS]


def _holt(values: Sequence[float], season: int | None = None) -> Sequence[float]:
    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    model = ExponentialSmoothing(
        values,
        trend="add",
        damped_trend=True,
        seasonal="add" if season else None,
        seasonal_periods=season,
        initialization_method="estimated" if season is None else "heuristic",
    )
    return _at_steps(model.fit().forecast(max(STEPS)))


def _auto_ets(values: Sequence[float]) -> Sequence[float]:
    import numpy
    from statsforecast.models import AutoETS

    found = AutoETS(season_length=1).forecast(y=numpy.asarray(values), h=max(STEPS))
    return _at_steps(found["mean"])


def _mstl(values: Sequence[float]) -> Sequence[float]:
    import numpy
    from statsforecast.models import MSTL, AutoETS

    found = MSTL(season_length=SEASON, trend_forecaster=AutoETS(model="ZZN")).forecast(
        y=numpy.asarray(values), h=max(STEPS)
    )
    return _at_steps(found["mean"])


def _once_known(
    guess: Callable[[Sequence[float]], Sequence[float]], least: int
) -> Callable[[Sequence[float]], Sequence[float]]:
    """The planner's way until so many bins are known."""
    return lambda values: guess(values) if len(values) >= least else _own(values[-OWN_WINDOW:])


METHODS = (
    Method("mean of the last minute", _mean_of(6)),
    Method("mean of the last five", _mean_of(30)),
    Method("planner, smoothing only", _own, window=OWN_WINDOW),
    Method("planner", _Returning(), window=sys.maxsize),
    Method("Holt-Winters, damped trend", _holt, "statsmodels"),
    Method("AutoETS", _auto_ets, "statsforecast"),
    Method("Holt-Winters, season", _once_known(lambda values: _holt(values, SEASON), 2 * SEASON), "statsmodels", 1440),
    Method("MSTL, season", _once_known(_mstl, 2 * SEASON), "statsforecast", 1440),
)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
