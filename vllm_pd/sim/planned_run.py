"""Workers of a simulated cluster over their lives, and what came of a simulation with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_pd.planner.model import Plan
from vllm_pd.sim.cluster import Job, Run
from vllm_pd.sim.planned_config import PlannedConfig
from vllm_pd.state.base import Epoch, Role, WorkerId


class State(StrEnum):
    """Of a start of a worker."""

    STARTING = "starting"
    UP = "up"
    MOVING = "moving"
    """It drains to change its role."""
    LEAVING = "leaving"
    """It drains to go."""
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Member:
    """One start of a worker."""

    id: WorkerId
    epoch: Epoch
    role: Role
    asked_at: float
    started_as: Role
    index: int = -1
    """Among engines and in the router; below 0 until it is up."""
    state: State = State.STARTING
    moving_to: Role | None = None
    since: float = 0.0
    """When it came into its state."""
    asked_by: str = ""
    startup_s: float = 0.0
    gone_at: float | None = None
    listed_until: float | None = None
    """Where it died: others do not know yet."""
    returns_as: Role | None = None
    """Where it leaves to start again in another role."""
    prefilling: dict[Job, None] = field(default_factory=dict)
    """Whose prompts it computes for others, or holds for them."""
    decoding: dict[Job, None] = field(default_factory=dict)
    """Sent to it to be answered."""
    dropping: Callable[[float], None] | None = None
    """To be done when the step in progress has ended."""


@dataclass(slots=True)
class PlannedRun:
    """What came of a simulation with changing workers."""

    config: PlannedConfig
    run: Run
    members: list[Member] = field(default_factory=list)
    arrivals: int = 0
    turned_away: int = 0
    """Requests for which nobody decoded."""
    lost: int = 0
    """Answers that broke off and that nobody could continue exactly."""
    handed_over: int = 0
    moves: list[float] = field(default_factory=list)
    """Seconds that each change of role took."""
    undone: int = 0
    starts: int = 0
    given_up: int = 0
    removed: int = 0
    died: int = 0
    horizon: float = 0.0
    """The last arrival."""
    plans: list[Plan] = field(default_factory=list)
    sizes: list[tuple[float, int, int, int]] = field(default_factory=list)
    """At each step of a planner: workers that prefill, decode, do both."""

    @property
    def gpu_seconds(self) -> float:
        """Of all workers from the moment each was asked for until it was gone, up to the last arrival."""
        end = self.horizon
        return sum(
            max(0.0, min(end, end if member.gone_at is None else member.gone_at) - member.asked_at)
            for member in self.members
        )
