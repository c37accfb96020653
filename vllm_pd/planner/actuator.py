"""The seam between a plan and whatever can carry it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_pd.planner.model import Action, StartView
from vllm_pd.state.base import PoolId, Role


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an action that was begun."""

    ok: bool
    detail: str = ""
    """What was done, or the cause and the remedy."""


class Actuator(Protocol):
    """Carries out actions. Every method has a deadline of its own, and raises `ActuatorError` when it cannot tell what
    came of it; one that was refused is an `Outcome` that is not ok. Nothing here waits until a worker has moved or
    come up: the next observation shows it.

    Just before each single thing that `act` and `give_up` begin they have the planner's leadership confirmed (see
    `mandate`), and raise `DeposedError` when it is not.
    """

    @property
    def name(self) -> str:
        """`roles`, `processes`, `kubernetes`, `command`, ..."""

    def can(self, action: Action) -> bool:
        """Whether it knows how to do this kind of action at all."""

    async def act(self, pool: PoolId, action: Action) -> Outcome:
        """Begin it. Idempotent: asked again for what is under way, it does nothing more."""

    async def starting(self, pool: PoolId) -> Sequence[StartView]:
        """Workers that it was asked for and that have not come up yet."""

    async def give_up(self, pool: PoolId, role: Role, count: int) -> Outcome:
        """Ask for so many workers of this role less: they did not come up in time."""

    async def close(self) -> None:
        """Release connections; what was begun goes on. Idempotent."""
