"""Reads the Prometheus text that workers and routers serve under `/metrics`."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 10.0
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: `name{labels} value`."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metrics(Mapping[str, float]):
    """All samples of one scrape. As a mapping: sample name to the sum over its label sets."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
        self._sums: dict[str, float] = {}
        for sample in samples:
            self._sums[sample.name] = self._sums.get(sample.name, 0.0) + sample.value

    def value(self, name: str, **labels: str) -> float:
        """Sum over the samples called `name` whose labels include `labels`; 0 when there is none."""
        wanted = labels.items()
        return sum(s.value for s in self.samples if s.name == name and wanted <= s.labels.items())

    def __getitem__(self, name: str) -> float:
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)


def parse(text: str) -> Metrics:
    """Parse one scrape."""
    families = text_string_to_metric_families(text)
    return Metrics([Sample(s.name, dict(s.labels), float(s.value)) for family in families for s in family.samples])


def scrape(base_url: str) -> Metrics:
    """Fetch and parse `base_url`/metrics. Raises OSError when the server does not answer."""
    with _direct.open(f"{base_url}/metrics", timeout=_TIMEOUT_S) as answer:
        return parse(answer.read().decode())
