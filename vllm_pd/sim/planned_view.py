"""What the router of a simulated cluster counts for a planner, as a real one reports it."""

from __future__ import annotations

from bisect import bisect_left

from vllm_pd.routing.model import Rates
from vllm_pd.state.demand import BOUNDS_S, DemandReport, Spread


class SpreadCount:
    """A histogram that grows."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """So often it took so long."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += count
        self._sum_s += seconds * count

    def spread(self) -> Spread:
        """As it is now."""
        return Spread(tuple(self._counts), self._sum_s)


class DemandCount:
    """Totals since the start."""

    def __init__(self) -> None:
        self.arrivals = 0
        self.finished = 0
        self.prompt_tokens = 0
        self.uncached_tokens = 0
        self.output_tokens = 0
        self.finished_output = 0
        self._ttft = SpreadCount()
        self._itl = SpreadCount()
        self._answer_itl = SpreadCount()

    def first_token(self, seconds: float) -> None:
        """A request got its first token so long after its arrival."""
        self._ttft.add(seconds)
        self.output_tokens += 1

    def gaps(self, seconds: float, count: int) -> None:
        """So many tokens came so long after the one before."""
        self._itl.add(seconds, count)
        self.output_tokens += count

    def ended(self, tokens: int, mean_itl_s: float) -> None:
        """An answer of so many tokens ended."""
        self.finished += 1
        self.finished_output += tokens
        if tokens > 1:
            self._answer_itl.add(mean_itl_s)

    def report(self, now: float, rates: Rates | None) -> DemandReport:
        """The totals at a time."""
        return DemandReport(
            started_ms=0,
            at_ms=round(now * 1000),
            arrivals=self.arrivals,
            finished=self.finished,
            prompt_tokens=self.prompt_tokens,
            uncached_tokens=self.uncached_tokens,
            output_tokens=self.output_tokens,
            finished_output_tokens=self.finished_output,
            ttft=self._ttft.spread(),
            itl=self._itl.spread(),
            answer_itl=self._answer_itl.spread(),
            rates=rates,
        )
