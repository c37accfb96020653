"""The actuator `roles`: tells a worker its new role, which it takes without a restart once it has drained."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_pd.errors import ActuatorError, StoreError
from vllm_pd.planner.actuator import Outcome
from vllm_pd.planner.mandate import ANYBODY, Mandate
from vllm_pd.planner.model import PLANNER, Action, MoveAction, StartView
from vllm_pd.roles import request_move
from vllm_pd.state.base import PoolId, Registry, Role
from vllm_pd.state.roles import Roles


class RoleLabels:
    """Asks for roles as `vllm-pd role` does, in the name of a planner: workers that a person moved are left alone.

    Args:
        registry, roles: of the store where the workers are registered. Both stay open.
        timeout_s: how long a worker may take before it goes on in the role that it had; 0: as long as usual.
        mandate: in whose name it asks: once another planner leads, the store refuses what this one asks for.
    """

    name = "roles"

    def __init__(
        self,
        registry: Registry,
        roles: Roles,
        *,
        timeout_s: float = 0.0,
        mandate: Mandate = ANYBODY,
    ) -> None:
        self._registry = registry
        self._roles = roles
        self._timeout_s = timeout_s
        self._mandate = mandate

    def can(self, action: Action) -> bool:
        return isinstance(action, MoveAction)

    async def act(self, pool: PoolId, action: Action) -> Outcome:
        if not isinstance(action, MoveAction):
            return Outcome(False, "Role labels move workers that are there; they start and end none.")
        try:
            asked = await request_move(
                self._registry,
                self._roles,
                action.worker,
                action.to,
                by=PLANNER,
                term=self._mandate.term(pool),
                epoch=action.epoch,
                timeout_s=self._timeout_s,
            )
        except StoreError as e:
            raise ActuatorError(f"Whether {action.worker} was told its role is not known: {e}") from None
        return Outcome(asked.ok, asked.detail)

    async def starting(self, pool: PoolId) -> Sequence[StartView]:
        return ()

    async def give_up(self, pool: PoolId, role: Role, count: int) -> Outcome:
        return Outcome(False, "Role labels start no workers.")

    async def close(self) -> None:
        return None
