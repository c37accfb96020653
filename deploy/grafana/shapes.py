"""Panels that several rows have in the same shape."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.grafana.model import Panel, Query
from deploy.grafana.promql import OF_WORKERS, by, quantile, rate, troubles

_QUANTILES = (0.5, 0.95, 0.99)


def counted(title: str, text: str, label: str, counter: str, labels: str = "", *, unit: str = "ops") -> Panel:
    """A line for each value of the label, or of several (`way, outcome`): what is counted, a second."""
    return Panel(title, text, (Query(by(label, counter, labels), _legend(label)),), unit)


def summed(title: str, text: str, counters: Mapping[str, str], labels: str, unit: str = "ops") -> Panel:
    """A line for each counter, by its legend: what it counts over all, a second."""
    lines = tuple(Query(f"sum({rate(counter, labels)})", legend) for legend, counter in counters.items())
    return Panel(title, text, lines, unit)


def troubled(title: str, text: str, label: str, counter: str, labels: str = "") -> Panel:
    """The same for what should not happen: with a line at 0 as long as it has not."""
    return Panel(title, text, (Query(troubles(label, counter, labels), _legend(label)),), "ops")


def timed(title: str, text: str, histogram: str, labels: str = "", *, beside: tuple[Query, ...] = ()) -> Panel:
    """Median, 95% and 99% of a duration, and what is drawn beside them."""
    lines = tuple(Query(quantile(q, histogram, labels), f"p{q * 100:g}") for q in _QUANTILES)
    return Panel(title, text, (*lines, *beside), "s")


def of_each_worker(title: str, text: str, gauge: str, unit: str = "short", *, high: float | None = None) -> Panel:
    """A line for each worker: what it says of itself."""
    query = Query(f"max by (worker) ({gauge}{{{OF_WORKERS}}})", "{{worker}}")
    return Panel(title, text, (query,), unit, high=high)


def _legend(label: str) -> str:
    return ", ".join(f"{{{{{each.strip()}}}}}" for each in label.split(","))
