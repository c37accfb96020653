"""What actuators are given."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_pd.state.base import Registry
from vllm_pd.state.roles import Roles


@dataclass(frozen=True, slots=True)
class ActuatorContext:
    """What an actuator may use; it stays open when the actuator is closed."""

    store: str
    """URL."""
    namespace: str
    registry: Registry
    roles: Roles
    move_timeout_s: float
    """How long a change of role may take."""
    deadline_s: float
    """Of one call of the actuator."""
    webhook_token: str = ""
