"""Which planner leads a pool, what it remembers, and what its steps were.

Several planners may run; one leads, for as long as it says so in time. A leadership has a number, its term, which only
grows: what a former leader writes changes nothing. The next leader goes on with the memory of the one before.
Planners that only try out (dry run) keep all of this apart from those that act.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_pd.state.base import PoolId

MEMORY_TTL_MS = 3_600_000
"""A memory of longer ago says nothing about now."""
JOURNAL_TTL_MS = 7 * 86_400_000
JOURNAL_LENGTH = 5000
"""About how many steps are kept."""
TERM_TTL_MS = 86_400_000
"""A term begins with the store's time in milliseconds, so it grows although the one before is forgotten."""


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads the planning of a pool."""

    planner: str
    """Its id."""
    term: int
    left_ms: int
    """Until its leadership ends unless it is renewed."""
    now_ms: int
    """The store's clock when this was said, milliseconds since 1970: the one clock that all planners share."""


class PlannerBoard(Protocol):
    """Deadlines and errors as for `Registry`."""

    async def lead(self, pool: PoolId, planner: str, lease_ms: int) -> Leader:
        """Become the leader where there is none, or stay it. Returns who leads now, perhaps another one."""

    async def leader(self, pool: PoolId) -> Leader | None:
        """Who leads."""

    async def resign(self, pool: PoolId, planner: str, term: int) -> bool:
        """Stop leading, so that another planner can at once. Returns whether it led. Idempotent."""

    async def write(self, pool: PoolId, term: int, *, memory: bytes, newest: bytes, journal: Sequence[bytes]) -> bool:
        """Replace memory and newest step, and add steps to the journal, all or nothing.

        Returns False, changing nothing, unless `term` is that of the leader.
        """

    async def memory(self, pool: PoolId) -> bytes | None:
        """What the last leader remembered; None where there was none for an hour."""

    async def newest(self, pool: PoolId) -> bytes | None:
        """The last step, whoever took it; None where there was none for an hour."""

    async def journal(self, pool: PoolId, limit: int) -> Sequence[bytes]:
        """The newest steps of the journal, oldest first, at most `limit`."""

    async def pools(self) -> Sequence[PoolId]:
        """Those that have a journal, also when no worker of them is left; in order."""

    async def close(self) -> None:
        """Release connections. Idempotent."""
