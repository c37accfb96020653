"""A Prometheus histogram that costs a fraction of a microsecond per observation. For one thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


@cache
def _edges(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """The upper bounds as Prometheus writes them."""
    return (*map(floatToGoString, bounds), "+Inf")


class Series:
    """The observations of one combination of labels.

    Args:
        bounds: upper bounds of the buckets, rising; one more holds the rest.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, int]]:
        """Each upper bound as Prometheus writes it, and how many were not above it."""
        return list(zip(_edges(self._bounds), accumulate(self.counts), strict=True))


class Histogram(Collector):
    """Series by label values, each made when it is first asked for.

    Args:
        name: without a suffix.
        bounds: upper bounds of the buckets, rising. With one below 0 there is no sum, which could fall.
    """

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry, labels: Sequence[str] = ()
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """The series of these label values."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Series(self._bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, series.buckets(), series.total if self._bounds[0] >= 0 else None)
        yield family
