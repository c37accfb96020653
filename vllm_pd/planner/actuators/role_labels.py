"""The actuator `roles`: tells a worker its new role, which it takes without a restart once it has drained."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from vllm_pd.errors import ActuatorError, StoreError
from vllm_pd.planner.actuator import Outcome
from vllm_pd.planner.actuators.known_start import another_start
from vllm_pd.planner.model import PLANNER, Action, MoveAction, StartView
from vllm_pd.state.base import PoolId, Registry, Role
from vllm_pd.state.roles import Roles, WantedRole


class RoleLabels:
    """Writes wishes, which the workers' agents obey.

    Args:
        registry, roles: of the store where the workers are registered. Both stay open.
        timeout_s: how long a worker may take before it goes on in the role that it had.
    """

    name = "roles"

    def __init__(self, registry: Registry, roles: Roles, *, timeout_s: float) -> None:
        self._registry = registry
        self._roles = roles
        self._timeout_s = timeout_s

    def can(self, action: Action) -> bool:
        return isinstance(action, MoveAction)

    async def act(self, pool: PoolId, action: Action) -> Outcome:
        if not isinstance(action, MoveAction):
            return Outcome(False, "Role labels move workers that are there; they start and end none.")
        refused = await another_start(self._registry, pool, action)
        if refused is not None:
            return refused
        timeout_ms = round(self._timeout_s * 1000)
        wish = WantedRole(action.to, action.epoch, secrets.token_hex(8), PLANNER, timeout_ms)
        try:
            before = await self._roles.of(pool, action.worker)
            if before is not None and before.epoch == action.epoch:
                if before.role is action.to:
                    return Outcome(True, f"{action.worker} has been told already, by {before.by}.")
                if before.by != PLANNER:
                    return Outcome(False, f"{before.by} wants {action.worker} to be {before.role}.")
            if not await self._roles.set(pool, action.worker, wish, 2 * timeout_ms):
                return Outcome(False, f"The worker {action.worker} was restarted since the planner looked at it.")
        except StoreError as e:
            raise ActuatorError(f"{action.worker} could not be told its role: {e}") from None
        return Outcome(True)

    async def starting(self, pool: PoolId) -> Sequence[StartView]:
        return ()

    async def give_up(self, pool: PoolId, role: Role, count: int) -> Outcome:
        return Outcome(False, "Role labels start no workers.")

    async def close(self) -> None:
        return None
