"""What a running graph says of itself."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from vllm_pd.graph.model import Kind


class Phase(StrEnum):
    """Where one process is in its life."""

    WAITING = "waiting"
    """For what it needs."""
    STARTING = "starting"
    READY = "ready"
    UNREADY = "not ready"
    """It was ready and says that it is not, or says nothing."""
    BACKOFF = "backoff"
    """It failed, and will be started again."""
    GIVEN_UP = "given up"
    """It failed too often in a row; `vllm-pd restart` tries again."""
    STOPPING = "stopping"
    ENDED = "ended"


class GraphState(StrEnum):
    """Of the whole."""

    STARTING = "starting"
    UP = "up"
    """As many of everything as wanted are ready."""
    DEGRADED = "degraded"
    STOPPING = "stopping"


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process."""

    name: str
    component: str
    phase: Phase
    for_s: float
    """In this phase."""
    down_for_s: float = 0.0
    """Since it was asked for, or was last up; 0 while it is up."""
    pid: int = 0
    url: str = ""
    place: str = ""
    """GPUs or cores."""
    restarts: int = 0
    """Since the graph was started."""
    failures: int = 0
    """In a row."""
    is_stuck: bool = False
    """It waits for something that was given up."""
    grace_s: float = 0.0
    """What it may take to end."""
    detail: str = ""
    """What it waits for, or why it failed last."""
    log: str = ""
    log_end: tuple[str, ...] = ()
    """The last lines of the run that failed last; empty when all is well."""


class ComponentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One component."""

    name: str
    kind: Kind
    wanted: int
    ready: int
    model: str = ""
    min: int = 0
    max: int = 0
    """Between how many it may be scaled; both 0 where it cannot be."""


class Event(msgspec.Struct, frozen=True):
    """Something that happened, numbered from 1."""

    number: int
    text: str


class GraphStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole."""

    graph: str
    state: GraphState
    for_s: float
    """Since the graph was started."""
    namespace: str
    pid: int
    """Of the supervisor."""
    url: str
    """Of the endpoint for clients."""
    model: str
    """What clients name as model, where it is known."""
    store: str
    """Its URL, without a password; "" for none."""
    logs: str
    machine: str
    components: tuple[ComponentStatus, ...]
    instances: tuple[InstanceStatus, ...]
    events: tuple[Event, ...] = ()

    def instance(self, name: str) -> InstanceStatus | None:
        return next((i for i in self.instances if i.name == name), None)
