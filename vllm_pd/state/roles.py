"""What role each worker is wanted in: written by a planner, obeyed by the workers' agents.

A wish names the start (epoch) of the worker that its author saw. A worker obeys only wishes for its own epoch, so a
restart begins with the role it was started with, and a planner that looked long ago changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from vllm_pd.state.base import Epoch, PoolId, Role, WorkerId


@dataclass(frozen=True, slots=True)
class WantedRole:
    """A wish for one start of a worker."""

    role: Role
    epoch: Epoch
    id: str = ""
    """Of this wish; the worker repeats it in its `RoleMove`."""
    by: str = "operator"
    """Who wishes: `planner`, or somebody whose wishes planners respect."""
    timeout_ms: int = 0
    """How long the move may take before it is undone; 0: as long as the worker's settings say."""


class Wished(StrEnum):
    """What became of a wish. Only `WISHED` has changed anything."""

    WISHED = "wished"
    OLD = "old"
    """There is a wish for a newer epoch."""
    DEPOSED = "deposed"
    """A planner's, and another planner leads the pool by now."""
    HELD = "held"
    """A planner's, and somebody else has a wish for this start of the worker."""
    LAST = "last"
    """Nobody of some kind would be left."""


AWAY_FROM: Mapping[Role, Role] = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
"""By kind of work: the role that takes a worker away from it."""

Stays = Mapping[Role, Sequence[tuple[WorkerId, Epoch]]]
"""By `PREFILL` and `DECODE`: the workers that do this and are not on their way to something else."""


class Roles(Protocol):
    """Deadlines and errors as for `Registry`."""

    async def set(self, pool: PoolId, worker: WorkerId, wanted: WantedRole, ttl_ms: int) -> bool:
        """Wish for a role, replacing an earlier wish. It ends by itself unless repeated.

        Returns False, changing nothing, when a wish for a newer epoch is there.
        """

    async def set_unless_last(
        self,
        pool: PoolId,
        worker: WorkerId,
        wanted: WantedRole,
        ttl_ms: int,
        stays: Stays,
        *,
        term: int | None = None,
    ) -> Wished:
        """`set`, but only if of each kind that `stays` names somebody is not wished away from it. Atomic: of two who
        at once wish the last two workers of a kind away, one is refused.

        `term`: of the leadership (`planner_board`) in whose name a planner wishes; None for everybody else. A planner
        that was paused may not know that another one leads by now, nor what people have wished meanwhile.
        """

    async def get(self, pool: PoolId) -> Mapping[WorkerId, WantedRole]:
        """All wishes that have not ended. Unreadable ones are skipped and counted."""

    async def of(self, pool: PoolId, worker: WorkerId) -> WantedRole | None:
        """The wish for one worker. Its agent asks again and again, so it costs the same in a cluster of any size."""

    async def clear(self, pool: PoolId, worker: WorkerId, epoch: Epoch, id: str = "") -> bool:
        """Take a wish back if it is for this epoch and, where an `id` is given, has it. Returns whether it was there.
        Idempotent."""

    async def close(self) -> None:
        """Release connections. Idempotent."""
