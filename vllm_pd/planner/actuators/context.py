"""What actuators are given."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_pd.planner.mandate import ANYBODY, Mandate
from vllm_pd.state.base import Registry
from vllm_pd.state.roles import Roles


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
    mandate: Mandate = ANYBODY
    """In whose name it acts."""
