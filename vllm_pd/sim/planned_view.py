"""What the router of a simulated cluster counts for a planner."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm_pd.planner.model import Latency, Traffic

_RESOLUTION_S = 1e-3
"""To which times are counted."""


@dataclass(slots=True)
class Counts:
    """Of one span of time, as `Traffic` has them."""

    since: float = 0.0
    arrivals: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    output_tokens: int = 0
    finished_output: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    itl: Counter[int] = field(default_factory=Counter)

    def first_token(self, seconds: float) -> None:
        """A request got its first token so long after its arrival."""
        self.ttft[round(seconds / _RESOLUTION_S)] += 1
        self.output_tokens += 1

    def gaps(self, seconds: float, count: int) -> None:
        """So many tokens came so long after the one before."""
        self.itl[round(seconds / _RESOLUTION_S)] += count
        self.output_tokens += count

    def traffic(self, now: float, ttft_s: float, itl_s: float, age_s: float) -> Traffic | None:
        """The span ends now. None for one without length."""
        if now <= self.since:
            return None
        return Traffic(
            seconds=now - self.since,
            arrivals=self.arrivals,
            finished=self.finished,
            prompt_tokens=self.prompt_tokens,
            uncached_tokens=self.uncached_tokens,
            output_tokens=self.output_tokens,
            mean_output=self.finished_output / self.finished if self.finished else None,
            ttft=_latency(self.ttft, ttft_s),
            itl=_latency(self.itl, itl_s),
            age_s=age_s,
        )


def _latency(times: Counter[int], target: float) -> Latency | None:
    total = times.total()
    if not total:
        return None
    ordered = sorted(times)
    mean = sum(time * count for time, count in times.items()) / total
    within = sum(count for time, count in times.items() if time * _RESOLUTION_S <= target) / total
    p50, p95 = (_percentile(ordered, times, q * total) for q in (0.5, 0.95))
    return Latency(total, mean * _RESOLUTION_S, p50 * _RESOLUTION_S, p95 * _RESOLUTION_S, within)


def _percentile(ordered: list[int], times: Counter[int], rank: float) -> int:
    seen = 0
    for time in ordered:
        seen += times[time]
        if seen >= rank:
            return time
    return ordered[-1]
