"""What the routers of a pool had to do between two looks at their totals. No I/O and no clock of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_pd.planner.model import Latency, Traffic
from vllm_pd.routing.speed import Rates
from vllm_pd.state.demand import BOUNDS_S, DemandReport, Spread

_NEW_SLACK_S = 2.0
"""A router that is not older than the time since the last look, and so much, has begun in it."""


@dataclass(slots=True)
class _Known:
    base: DemandReport
    """As it was at the last look at which it was new."""
    changed_s: float
    """When it last was new, by the caller's clock."""


class DemandWatch:
    """Keeps the reports of the look before. Routers' clocks are only compared with themselves."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._looked_s: float | None = None

    def look(self, reports: Mapping[str, DemandReport], now_s: float, *, ttft_s: float, itl_s: float) -> Traffic | None:
        """The traffic since the look before; None where nothing new was reported of a known span.

        Args:
            now_s: monotonic.
            ttft_s, itl_s: the targets that `Latency.within` is about.
        """
        before, self._looked_s = self._looked_s, now_s
        spans: list[tuple[DemandReport, DemandReport]] = []
        known: dict[str, _Known] = {}
        for router, report in reports.items():
            seen = self._known.get(router)
            if seen is None:
                age_s = (report.at_ms - report.started_ms) / 1000
                if before is not None and 0 <= age_s <= now_s - before + _NEW_SLACK_S:
                    spans.append((_begun(report), report))
                known[router] = _Known(report, now_s)
            elif report.at_ms != seen.base.at_ms:
                if report.at_ms > seen.base.at_ms and report.started_ms == seen.base.started_ms:
                    spans.append((seen.base, report))
                known[router] = _Known(report, now_s)
            else:
                known[router] = seen
        self._known = known
        if not spans:
            return None
        seconds = sum(later.at_ms - earlier.at_ms for earlier, later in spans) / len(spans) / 1000
        if seconds <= 0:
            return None
        finished = _sum(spans, "finished")
        return Traffic(
            seconds=seconds,
            arrivals=_sum(spans, "arrivals"),
            finished=finished,
            prompt_tokens=_sum(spans, "prompt_tokens"),
            uncached_tokens=_sum(spans, "uncached_tokens"),
            output_tokens=_sum(spans, "output_tokens"),
            mean_output=_sum(spans, "finished_output_tokens") / finished if finished else None,
            ttft=latency([(earlier.ttft, later.ttft) for earlier, later in spans], ttft_s),
            itl=latency([(earlier.itl, later.itl) for earlier, later in spans], itl_s),
            age_s=max(now_s - each.changed_s for each in known.values()),
        )


def usual_rates(reports: Mapping[str, DemandReport]) -> Rates | None:
    """As the router learned them that has served most; None while none has learned any."""
    learned = [report for report in reports.values() if report.rates is not None]
    return max(learned, key=lambda report: (report.finished, report.at_ms)).rates if learned else None


def latency(spans: Sequence[tuple[Spread, Spread]], target_s: float) -> Latency | None:
    """How long it took in a span; None where nothing was measured in it."""
    buckets = len(BOUNDS_S) + 1
    counts = [max(0, sum(later.counts[i] - earlier.counts[i] for earlier, later in spans)) for i in range(buckets)]
    count = sum(counts)
    if not count:
        return None
    total = sum(later.sum_s - earlier.sum_s for earlier, later in spans)
    return Latency(
        count,
        max(0.0, total / count),
        _quantile(counts, count, 0.5),
        _quantile(counts, count, 0.95),
        _within(counts, count, target_s),
    )


def _begun(report: DemandReport) -> DemandReport:
    """The totals of a router at its start."""
    return DemandReport(report.started_ms, report.started_ms)


def _sum(spans: Sequence[tuple[DemandReport, DemandReport]], name: str) -> int:
    total: int = sum(getattr(later, name) - getattr(earlier, name) for earlier, later in spans)
    return max(0, total)


def _edges(bucket: int) -> tuple[float, float]:
    """Of the last one, which has no upper bound, twice the lower one stands for it."""
    low = BOUNDS_S[bucket - 1] if bucket else 0.0
    return low, BOUNDS_S[bucket] if bucket < len(BOUNDS_S) else 2 * low


def _quantile(counts: Sequence[int], count: int, part: float) -> float:
    wanted, passed = part * count, 0
    for bucket, here in enumerate(counts):
        if here and passed + here >= wanted:
            low, high = _edges(bucket)
            return low + (high - low) * (wanted - passed) / here
        passed += here
    return _edges(len(counts) - 1)[1]


def _within(counts: Sequence[int], count: int, target_s: float) -> float:
    met = 0.0
    for bucket, here in enumerate(counts):
        low, high = _edges(bucket)
        met += here * min(1.0, max(0.0, (target_s - low) / (high - low)))
    return met / count
