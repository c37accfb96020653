"""A cluster as one value: which components there are, how many of each, what they are told, who sends work to whom.

Made from a file (`load`) or in Python (`build`), checked in one place (`check`), and turned into processes of this
machine (`processes`) or into Kubernetes manifests (`kubernetes`). Pure values; nothing here starts or reads anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from vllm_pd.state.base import Role

DEFAULT_NAMESPACE = "default"
DEFAULT_PORT = 8080
DEFAULT_READY_S = 900.0
"""A large model is read from a network drive, and a GPU compiles kernels at its first start."""


class Kind(StrEnum):
    """What a component is."""

    FRONTEND = "frontend"
    ROUTER = "router"
    STORE = "store"
    PLANNER = "planner"
    PREFILL = "prefill"
    DECODE = "decode"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Limits:
    """Between how many instances a component may be scaled, by hand or by the planner; both count."""

    min: int = 0
    max: int = 64


@dataclass(frozen=True, slots=True)
class RestartRule:
    """What happens to an instance that ended by itself: started again after a delay that doubles each time."""

    tries: int = 5
    """How often in a row it is started again before it is given up."""
    first_delay_s: float = 1.0
    longest_delay_s: float = 60.0
    healthy_s: float = 60.0
    """An instance that was ready for so long starts with a clean record: its next failure is its first."""
    silent_s: float = 300.0
    """One that runs and has not answered for so long is ended and counts as failed; 0: never."""

    def delay_after(self, failures: int) -> float | None:
        """Seconds until the next start after so many failures in a row (at least 1); None: it is given up."""
        if failures > self.tries:
            return None
        # The exponent is bounded: a rule may allow thousands of tries.
        return min(self.first_delay_s * 2.0 ** min(failures - 1, 64), self.longest_delay_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What all components have.

    Attributes:
        name: how links, logs and commands call it; "" stands for its kind.
        settings: settings of its program by the names that its own file would use; see `check` for which.
        args: further arguments of its program, after all others.
        env: variables that only its processes get.
        secrets: names of variables whose values are in no file: here they are those of the environment in which the
            graph is started (it is an error if one is not set), on Kubernetes they come from a Secret.
    """

    kind: ClassVar[Kind]

    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its name, or that of its kind."""
        return self.name or str(self.kind)

    def link(self, *components: Component) -> Chain:
        """A chain in which this one sends requests to each of `components`."""
        return Chain((self,), ends=(self.label,)).link(*components)


@dataclass(frozen=True, slots=True)
class Frontend(Component):
    """The endpoint of clients: the HTTP server of `vllm-pd-router`. Linked straight to workers it spreads requests by
    load; linked to a `Router` it chooses by their KV caches. `settings` are those of `vllm-pd-router`.

    Attributes:
        count: processes that answer; on one machine they listen on ports that follow each other.
        port: 0 picks a free one.
    """

    kind: ClassVar[Kind] = Kind.FRONTEND

    count: int = 1
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT


@dataclass(frozen=True, slots=True)
class Router(Component):
    """How a worker is chosen, and when a prompt is prefilled elsewhere: the deciding part of `vllm-pd-router`. It runs
    in the frontend's processes. `settings` are those of `vllm-pd-router`.
    """

    kind: ClassVar[Kind] = Kind.ROUTER


@dataclass(frozen=True, slots=True)
class Store(Component):
    """The Redis-compatible store in which workers register. There is at most one; whatever needs it uses it.

    Attributes:
        url: of one that is there already; "" has one started with the graph (`settings` are then lines of its
            configuration file).
        port: of one that is started; 0 picks a free one.
    """

    kind: ClassVar[Kind] = Kind.STORE

    url: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class Planner(Component):
    """Moves workers between prefill and decode, and adds and removes them: `vllm-pd planner run`. Linked to the
    components whose workers it may start and end; `settings` are its own.
    """

    kind: ClassVar[Kind] = Kind.PLANNER


@dataclass(frozen=True, slots=True)
class Workers(Component):
    """So many equal `vllm serve` processes. `settings` are those of `vllm serve --kv-connector pd` (`cpu_gib`, ...),
    `args` are further ones of `vllm serve`.

    Attributes:
        count: how many are started with the graph.
        model: "" stands for the graph's.
        gpus: of each worker; more than one makes it tensor-parallel unless `args` split the model otherwise, and a
            fraction (0.5) has workers share a GPU.
        cores: of each worker, on a machine without GPUs.
        kv_blocks: KV blocks of each worker, on a machine without GPUs, where vLLM's own choice is gigabytes.
        limits: between how many it may be scaled.
        ready_s: seconds that one may take to come up, loading and compiling included.
    """

    role: ClassVar[Role]

    count: int = 1
    model: str = ""
    gpus: float = 1
    cores: int = 1
    kv_blocks: int = 128
    limits: Limits = Limits()
    ready_s: float = DEFAULT_READY_S


@dataclass(frozen=True, slots=True)
class Prefill(Workers):
    """Workers that start as prefill workers."""

    kind: ClassVar[Kind] = Kind.PREFILL
    role: ClassVar[Role] = Role.PREFILL


@dataclass(frozen=True, slots=True)
class Decode(Workers):
    """Workers that start as decode workers, and have long prompts prefilled by those that they are linked to."""

    kind: ClassVar[Kind] = Kind.DECODE
    role: ClassVar[Role] = Role.DECODE


@dataclass(frozen=True, slots=True)
class Worker(Workers):
    """Workers that do both (aggregated ones)."""

    kind: ClassVar[Kind] = Kind.WORKER
    role: ClassVar[Role] = Role.BOTH


COMPONENTS: Mapping[Kind, type[Component]] = {
    cls.kind: cls for cls in (Frontend, Router, Store, Planner, Prefill, Decode, Worker)
}


@dataclass(frozen=True, slots=True)
class Link:
    """`source` sends requests to `target`, or plans it; both are names of components."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Components that are being linked: `Frontend().link(Router()).link(Decode(2)).link(Prefill(1))`.

    Every step makes a new chain, so that what two graphs have in common can be written once.
    """

    components: tuple[Component, ...]
    links: tuple[Link, ...] = ()
    ends: tuple[str, ...] = ()

    def link(self, *components: Component) -> Chain:
        """The last ones send requests to each of `components`, which are then the last ones."""
        links = tuple(Link(end, component.label) for end in self.ends for component in components)
        return Chain(
            self.components + components, self.links + links, tuple(component.label for component in components)
        )

    def beside(self, *components: Component) -> Chain:
        """With components through which no request goes: a store of your own, a planner."""
        return Chain(self.components + components, self.links, self.ends)

    def graph(
        self,
        name: str,
        *,
        model: str,
        namespace: str = DEFAULT_NAMESPACE,
        restart: RestartRule = RestartRule(),
        kubernetes: Mapping[str, Any] | None = None,
    ) -> Graph:
        """The graph of all of them; see `Graph`. A store is added where one is needed and none is among them."""
        kinds = {component.kind for component in self.components}
        needed = bool(kinds & {Kind.ROUTER, Kind.PLANNER, Kind.PREFILL}) and Kind.STORE not in kinds
        components = (*self.components, Store()) if needed else self.components
        return Graph(name, model, components, self.links, namespace, restart, dict(kubernetes or {}))


@dataclass(frozen=True, slots=True)
class Graph:
    """One cluster.

    Attributes:
        name: tells graphs on one machine, and in one Kubernetes namespace, apart.
        model: folder or hub name, for workers that name none.
        components: in the order of the file. Names are unique.
        namespace: separates clusters that share a store.
        restart: for every component.
        kubernetes: options of the rendering, which knows them.
    """

    name: str
    model: str
    components: tuple[Component, ...]
    links: tuple[Link, ...] = ()
    namespace: str = DEFAULT_NAMESPACE
    restart: RestartRule = RestartRule()
    kubernetes: Mapping[str, Any] = field(default_factory=dict)

    def component(self, name: str) -> Component | None:
        """The component called `name`; None if there is none."""
        return next((c for c in self.components if c.label == name), None)

    def targets(self, name: str) -> tuple[Component, ...]:
        """What `name` is linked to, in the order of its links. Links to nothing are left out; `check` names them."""
        found = (self.component(link.target) for link in self.links if link.source == name)
        return tuple(component for component in found if component is not None)

    def of_kind(self, kind: Kind) -> Iterator[Component]:
        return (c for c in self.components if c.kind is kind)

    @property
    def frontend(self) -> Frontend | None:
        return next((c for c in self.components if isinstance(c, Frontend)), None)

    @property
    def router(self) -> Router | None:
        return next((c for c in self.components if isinstance(c, Router)), None)

    @property
    def store(self) -> Store | None:
        return next((c for c in self.components if isinstance(c, Store)), None)

    @property
    def planner(self) -> Planner | None:
        return next((c for c in self.components if isinstance(c, Planner)), None)

    @property
    def workers(self) -> tuple[Workers, ...]:
        """The components that are workers, of whatever kind."""
        return tuple(c for c in self.components if isinstance(c, Workers))

    @property
    def planned(self) -> tuple[Workers, ...]:
        """The components whose workers the planner may start and end: those that it is linked to, or else all."""
        linked = self.targets(self.planner.label) if self.planner is not None else ()
        return tuple(c for c in linked if isinstance(c, Workers)) or self.workers

    def model_of(self, workers: Workers) -> str:
        """The model that these workers serve."""
        return workers.model or self.model
