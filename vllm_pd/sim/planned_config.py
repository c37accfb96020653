"""What is simulated of a cluster whose workers come, go and change their roles."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from vllm_pd.agent.role_move import HAND_OVER_PART
from vllm_pd.errors import SettingsError
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.roles import DEFAULT_TIMEOUT_S
from vllm_pd.sim.cluster import ClusterConfig


@dataclass(frozen=True, slots=True)
class Life:
    """How workers come, go and change. Times in seconds. Raises SettingsError for values that cannot be meant."""

    cold_start: float = 60.0
    """From asking for a worker until it serves, with an empty cache. It is paid for from the moment it is asked for."""
    start_spread: float = 0.1
    """A start takes up to this fraction longer or shorter."""
    start_fails: float = 0.0
    """Probability that a worker that was asked for never comes up; it is paid for until it is given up."""
    lost_per_hour: float = 0.0
    """How often the process of a worker dies; it is started again, cold, in the role that it was started in."""
    lease: float = 10.0
    """A worker that died is listed for so long."""
    obeys_after: float = 1.0
    """From a plan until the worker, or whoever starts workers, acts on it."""
    seen_after: float = 1.0
    """Age of everything that the planner sees."""
    move_timeout: float = DEFAULT_TIMEOUT_S
    """A change of role that takes longer is undone."""
    hand_over_part: float = HAND_OVER_PART
    """A worker that drains hands the streams over that have not ended after this part of the timeout: another one
    computes prompt and answer so far, and goes on."""
    continuable: float = 0.95
    """Fraction of the streams that can be handed over exactly; the others are waited for."""
    in_place: bool = True
    """Whether a worker changes its role without a restart. Else it drains, stops and starts cold in the new role."""

    @property
    def hand_over_after(self) -> float:
        return self.hand_over_part * self.move_timeout

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if not math.isfinite(value) or value < 0:
                raise SettingsError(f"{spec.name} of simulated workers is {value}; it must be a number of at least 0.")
        for name in ("start_spread", "start_fails", "hand_over_part", "continuable"):
            if getattr(self, name) > 1:
                raise SettingsError(f"{name} of simulated workers is a fraction between 0 and 1.")


@dataclass(frozen=True, slots=True)
class PlannedConfig:
    """A cluster with a planner, or without one for comparison."""

    cluster: ClusterConfig
    """Its workers are those at the beginning."""
    planner: PlannerConfig | None = None
    ttft_s: float = 0.5
    """Targets by which requests are judged; those of the planner are its own."""
    itl_s: float = 0.05
    """Mean time between two tokens of a request."""
    life: Life = Life()
    grace: float = 120.0
    """Seconds after the last arrival that are simulated; what has not ended by then has not met its targets."""
