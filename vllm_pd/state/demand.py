"""What the routers of a pool served, told to planners: totals since a router's start, so a lost report loses nothing.

A planner keeps the report it saw before and looks at the difference; a router that restarts has a new id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from vllm_pd.routing.speed import Rates
from vllm_pd.state.base import PoolId

BOUNDS_S = tuple(0.001 * 10 ** (step / 32) for step in range(165))
"""Upper bounds of the buckets of `Spread`: 32 a decade, from 1 ms to over two minutes; one more holds the rest. Fine
enough to tell what is just within a target from what just misses it: most of it may lie there."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A histogram of seconds over `BOUNDS_S`, with its sum."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    sum_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DemandReport:
    """One router's totals for one pool since `started_ms`. They only grow; those that begin anew have another start."""

    started_ms: int
    """The router's clock then, milliseconds since 1970."""
    at_ms: int
    """When it was made: `started_ms` and the time that has really passed since, whatever became of the clock."""
    arrivals: int = 0
    finished: int = 0
    """Answers that have ended and whose length is known."""
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    output_tokens: int = 0
    finished_output_tokens: int = 0
    """Those of `output_tokens` that belong to answers that have ended."""
    ttft: Spread = Spread()
    itl: Spread = Spread()
    """Between two tokens of a stream, each gap counted."""
    answer_itl: Spread = Spread()
    """The mean of these of each answer that has ended."""
    rates: Rates | None = None
    """Of the pool's usual worker as this router learned them; None while they are a mere prior."""


class DemandBoard(Protocol):
    """Deadlines and errors as for `Registry`."""

    async def publish(self, pool: PoolId, router: str, report: DemandReport, ttl_ms: int) -> None:
        """Replace the report of one router, its only writer."""

    async def read(self, pool: PoolId) -> Mapping[str, DemandReport]:
        """The reports that have not ended, by router. Unreadable ones are skipped and counted."""

    async def close(self) -> None:
        """Release connections. Idempotent."""
