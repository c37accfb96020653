"""What a conformance suite needs of the store it runs on."""

from __future__ import annotations

from typing import Protocol

from vllm_pd.state import BlockIndex, PrefillQueue, QueueLimits, Registry, Roles
from vllm_pd.state.demand import DemandBoard
from vllm_pd.state.planner_board import PlannerBoard


class Harness(Protocol):
    """One store under test. Whatever it opens is closed by the fixture."""

    def registry(self, namespace: str = "test") -> Registry: ...

    def block_index(self, namespace: str = "test") -> BlockIndex: ...

    def roles(self, namespace: str = "test") -> Roles: ...

    def prefill_queue(self, limits: QueueLimits, namespace: str = "test") -> PrefillQueue: ...

    def demand(self, namespace: str = "test") -> DemandBoard: ...

    def planner_board(self, namespace: str = "test", *, dry: bool = False) -> PlannerBoard: ...

    async def pass_time(self, ms: int) -> None:
        """Return when the store's clock is at least `ms` further."""

    async def lose_everything(self) -> None:
        """Make the store forget all keys, as a restart without persistence does."""
