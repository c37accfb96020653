"""What a planner looks at, and what it answers. No I/O and no clock: times are seconds, given by the caller.

Unknown is not zero: what nobody has said is None, and a plan made of too little or too old knowledge changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from vllm_pd.routing.model import Rates
from vllm_pd.state.base import Epoch, PoolId, Role, WorkerId

PLANNER = "planner"
"""Who asked for a role, as workers repeat it: a planner; everything else was a person or a person's program."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker of a pool."""

    id: WorkerId
    epoch: Epoch
    role: Role
    """What it does now; while it moves, what it did before."""
    moving_to: Role | None = None
    moving_for_s: float = 0.0
    asked_by: str = ""
    """Who last had its role changed: `PLANNER`, somebody else, or "" when it has the role it was started in."""
    is_held: bool = False
    """Its role was asked for by hand and is not to be changed until that is taken back."""
    draining: bool = False
    """It is being taken away: it does no new work."""
    running: int | None = None
    """Requests being computed, waiting ones, and the fraction of KV blocks in use: None when not reported lately."""
    waiting: int | None = None
    kv_usage: float | None = None
    load_age_s: float | None = None
    startup_s: float | None = None
    """How long its start took, as it says; what was before its process began is not in it."""

    @property
    def is_settled(self) -> bool:
        """Whether it does one role's work and is going to."""
        return self.moving_to is None and not self.draining


@dataclass(frozen=True, slots=True)
class Latency:
    """How long something took, over the requests of a span."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float
    within: float
    """Fraction that met the target."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the routers of a pool had to do in the last `seconds`."""

    seconds: float
    arrivals: int
    """Requests that began."""
    finished: int
    prompt_tokens: int
    """Of those that began."""
    uncached_tokens: int
    """Of them to be computed; the rest was in some cache."""
    output_tokens: int
    """Given in that time."""
    mean_output: float | None = None
    """Tokens of an answer, of those that finished; None when none did."""
    ttft: Latency | None = None
    itl: Latency | None = None
    """Over all gaps between tokens."""
    answer_itl: Latency | None = None
    """Over the means of the answers that ended."""
    age_s: float = 0.0
    """Since the end of that time."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """What waits for a prefill worker."""

    requests: int
    tokens: int
    oldest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StartView:
    """Workers that were asked for and have not come up."""

    role: Role
    count: int
    for_s: float
    """Since the oldest of them was asked for."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """Everything a planner knows of one pool at one moment."""

    pool: PoolId
    at_s: float
    """On the caller's clock; may jump."""
    workers: tuple[WorkerView, ...] = ()
    queue: QueueView | None = None
    traffic: Traffic | None = None
    rates: Rates | None = None
    """Of the pool's usual worker; None while it has shown nothing."""
    kv_tokens: int | None = None
    """Tokens that fit into the GPU-side cache of the pool's usual worker."""
    starts: tuple[StartView, ...] = ()
    age_s: float = 0.0
    """Since the list of workers was read."""
    partial: str = ""
    """What could not be read, for the explanation; "" when everything could."""


class Mode(StrEnum):
    """What a planner may do."""

    FIXED = "fixed"
    """Moves workers between prefill and decode; their number stays."""
    SCALE = "scale"
    """Also adds and removes them, between a smallest and a largest total."""


@dataclass(frozen=True, slots=True)
class MoveAction:
    """One worker is to change its role."""

    worker: WorkerId
    epoch: Epoch
    to: Role
    why: str


@dataclass(frozen=True, slots=True)
class AddAction:
    """So many workers of this role are to be started."""

    role: Role
    count: int
    why: str


@dataclass(frozen=True, slots=True)
class RemoveAction:
    """One worker is to be drained and taken away."""

    worker: WorkerId
    epoch: Epoch
    why: str


Action = MoveAction | AddAction | RemoveAction


@dataclass(frozen=True, slots=True)
class GiveUp:
    """So many workers of this role that were asked for did not come up in time and are not waited for any more."""

    role: Role
    count: int
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step decided, and why; enough to be understood by somebody who saw nothing else."""

    at_s: float
    actions: tuple[Action, ...] = ()
    give_up: tuple[GiveUp, ...] = ()
    """For `Actuator.give_up`, before the actions."""
    verdict: str = ""
    """One sentence: what is done, or why nothing is."""
    reasons: tuple[str, ...] = ()
    """Sentences, in the order of the thoughts: what was seen, what is expected, what is needed, what held it back."""
    numbers: dict[str, float] = field(default_factory=dict)
    """What entered: names with their unit, `arrivals_per_s`, `prefill_load`, `decode_needed`, ... All finite."""
