"""What actuators are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_pd.state.base import PoolId, Registry
from vllm_pd.state.roles import Roles


def no_term(pool: PoolId) -> int:
    """Of somebody who leads no pool."""
    return 0


@dataclass(frozen=True, slots=True)
class ActuatorContext:
    """What an actuator may use; it stays open when the actuator is closed."""

    store: str = field(repr=False)
    """URL."""
    namespace: str
    registry: Registry
    roles: Roles
    move_timeout_s: float
    """How long a change of role may take."""
    deadline_s: float
    """Of one call of the actuator."""
    webhook_token: str = field(default="", repr=False)
    term: Callable[[PoolId], int] = no_term
    """Number of the planner's leadership of a pool: what it writes is fenced by that."""
