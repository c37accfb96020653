"""What the routers of a pool had to do between two looks at their totals. No I/O and no clock of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_pd.planner.model import Latency, Traffic
from vllm_pd.routing.speed import Rates
from vllm_pd.state.demand import BOUNDS_S, DemandReport, Spread

_NEW_SLACK_S = 2.0
"""A router that is not older than the time since the last look, and so much, has begun in it."""
_LATE_S = 5.0
"""A router that has said nothing new for so long is silent. It reports every second."""


@dataclass(frozen=True, slots=True)
class _Span:
    """What one router did between two of its reports."""

    earlier: DemandReport
    later: DemandReport
    whole: bool = True
    """Whether it was there for all of the time since the last look; else it has begun in it."""

    @property
    def seconds(self) -> float:
        return (self.later.at_ms - self.earlier.at_ms) / 1000


@dataclass(slots=True)
class _Known:
    newest: DemandReport
    changed_s: float
    """When it last was new, by the caller's clock."""
    span: _Span | None = None
    """To the newest report from the one before."""


class DemandWatch:
    """Keeps the reports of the look before. Routers' clocks are only compared with themselves."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._looked_s: float | None = None

    def look(self, reports: Mapping[str, DemandReport], now_s: float, *, ttft_s: float, itl_s: float) -> Traffic | None:
        """The traffic since the look before; None where it is not known of every router.

        Args:
            now_s: monotonic.
            ttft_s, itl_s: the targets that `Latency.within` is about.
        """
        before, self._looked_s = self._looked_s, now_s
        self._known = {
            router: self._followed(self._known.get(router), report, before, now_s) for router, report in reports.items()
        }
        if any(now_s - known.changed_s > _LATE_S for known in self._known.values()):
            # What the others had to do is not all there was.
            return None
        spans = [known.span for known in self._known.values() if known.span is not None and known.span.seconds > 0]
        if not spans:
            return None
        # One that has just begun had less time to do anything, and one whose last report was lost tells of more.
        whole = [span.seconds for span in spans if span.whole]
        seconds = min(whole) if whole else max(span.seconds for span in spans)
        finished = _sum(spans, "finished")
        return Traffic(
            seconds=seconds,
            arrivals=_sum(spans, "arrivals", seconds),
            finished=_sum(spans, "finished", seconds),
            prompt_tokens=_sum(spans, "prompt_tokens", seconds),
            uncached_tokens=_sum(spans, "uncached_tokens", seconds),
            output_tokens=_sum(spans, "output_tokens", seconds),
            mean_output=_sum(spans, "finished_output_tokens") / finished if finished else None,
            ttft=latency([(span.earlier.ttft, span.later.ttft) for span in spans], ttft_s),
            itl=latency([(span.earlier.itl, span.later.itl) for span in spans], itl_s),
            answer_itl=latency([(span.earlier.answer_itl, span.later.answer_itl) for span in spans], itl_s),
            age_s=max(now_s - known.changed_s for known in self._known.values()),
        )

    @staticmethod
    def _followed(known: _Known | None, report: DemandReport, before: float | None, now_s: float) -> _Known:
        if known is not None and known.newest.started_ms == report.started_ms:
            if report.at_ms == known.newest.at_ms:
                # The moment's delay of a report is no silence: it goes on as it did.
                return known
            came = report.at_ms > known.newest.at_ms
            return _Known(report, now_s, _Span(known.newest, report) if came else None)
        age_s = (report.at_ms - report.started_ms) / 1000
        if before is not None and 0 <= age_s <= now_s - before + _NEW_SLACK_S:
            return _Known(report, now_s, _Span(_begun(report), report, whole=False))
        return _Known(report, now_s)


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


def _sum(spans: Sequence[_Span], name: str, seconds: float | None = None) -> int:
    """Of all spans; of each no more than its part of `seconds`, if given."""
    total = 0.0
    for span in spans:
        part = 1.0 if seconds is None else min(1.0, seconds / span.seconds)
        total += (getattr(span.later, name) - getattr(span.earlier, name)) * part
    return max(0, round(total))


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
