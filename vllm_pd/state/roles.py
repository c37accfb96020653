"""What role each worker is wanted in: written by a planner, obeyed by the workers' agents.

A wish names the start (epoch) of the worker that its author saw. A worker obeys only wishes for its own epoch, so a
restart begins with the role it was started with, and a planner that looked long ago changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


class Roles(Protocol):
    """Deadlines and errors as for `Registry`."""

    async def set(self, pool: PoolId, worker: WorkerId, wanted: WantedRole, ttl_ms: int) -> bool:
        """Wish for a role, replacing an earlier wish. It ends by itself unless repeated.

        Returns False, changing nothing, when a wish for a newer epoch is there.
        """

    async def get(self, pool: PoolId) -> Mapping[WorkerId, WantedRole]:
        """All wishes that have not ended. Unreadable ones are skipped and counted."""

    async def of(self, pool: PoolId, worker: WorkerId) -> WantedRole | None:
        """The wish for one worker. Its agent asks again and again, so it costs the same in a cluster of any size."""

    async def clear(self, pool: PoolId, worker: WorkerId, epoch: Epoch) -> bool:
        """Take a wish back if it is for this epoch. Returns whether it was there. Idempotent."""

    async def close(self) -> None:
        """Release connections. Idempotent."""
