"""Whether a graph can work, before anything is started. Pure.

Every refusal is one sentence that names the component and says what to change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations

from vllm_pd.errors import SettingsError
from vllm_pd.graph import check_settings, program_args
from vllm_pd.graph.model import Component, Decode, Frontend, Graph, Kind, Prefill, Store, Workers
from vllm_pd.graph.processes import NAMESPACE_VARIABLE, STORE_VARIABLE
from vllm_pd.graph.runs import CONTROL_VARIABLE, PLANS_VARIABLE, RUN_VARIABLE
from vllm_pd.layered import nearest

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
"""Of graphs and components: also a name on Kubernetes, with room for a number behind it."""
_GIVEN_VARIABLES = {
    RUN_VARIABLE: "the supervisor",
    CONTROL_VARIABLE: "the supervisor",
    PLANS_VARIABLE: "the links of the planner",
    STORE_VARIABLE: "the store component",
    NAMESPACE_VARIABLE: "namespace of the graph",
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ALONE = (Kind.FRONTEND, Kind.ROUTER, Kind.STORE, Kind.PLANNER)

LINKS: Mapping[Kind, tuple[Kind, ...]] = {
    Kind.FRONTEND: (Kind.ROUTER, Kind.DECODE, Kind.PREFILL, Kind.WORKER, Kind.STORE),
    Kind.ROUTER: (Kind.DECODE, Kind.PREFILL, Kind.WORKER, Kind.STORE),
    Kind.PLANNER: (Kind.DECODE, Kind.PREFILL, Kind.WORKER, Kind.STORE),
    Kind.DECODE: (Kind.PREFILL, Kind.STORE),
    Kind.WORKER: (Kind.PREFILL, Kind.STORE),
    Kind.PREFILL: (Kind.STORE,),
    Kind.STORE: (),
}
"""What each kind may be linked to. Nothing leads back, so what a component is linked to can be started before it."""


def check(graph: Graph) -> Graph:
    """Returns the graph itself.

    Raises:
        SettingsError: it cannot work.
    """
    _check_names(graph)
    _check_links(graph)
    _check_wholeness(graph)
    for component in graph.components:
        _check_environment(component)
        if isinstance(component, Workers):
            _check_workers(graph, component)
    if (store := graph.store) is not None:
        _check_store(store)
    check_settings.check(graph)
    _check_ports(graph)
    return graph


def _check_names(graph: Graph) -> None:
    if not NAME.fullmatch(graph.name):
        raise SettingsError(
            f"The graph's name {graph.name!r} must be 1 to 40 lower-case letters, digits and dashes: graph: my-cluster."
        )
    seen: set[str] = set()
    for component in graph.components:
        if not NAME.fullmatch(component.label):
            raise SettingsError(
                f"The name {component.label!r} of a component must be 1 to 40 lower-case letters, digits and dashes."
            )
        if component.label in seen:
            raise SettingsError(f"Two components are called {component.label!r}; give one of them another name.")
        seen.add(component.label)
    for kind in _ALONE:
        names = [component.label for component in graph.of_kind(kind)]
        if len(names) > 1:
            raise SettingsError(f"There may be one {kind} in a graph, and {' and '.join(names)} are {len(names)}.")


def _check_links(graph: Graph) -> None:
    names = [component.label for component in graph.components]
    seen = set()
    for link in graph.links:
        source, target = graph.component(link.source), graph.component(link.target)
        for name, found in ((link.source, source), (link.target, target)):
            if found is None:
                raise SettingsError(
                    f"{link.source} is linked to {link.target}, and there is no component {name!r}"
                    f"{nearest(name, names)}; components are {', '.join(names)}."
                )
        if source is None or target is None:
            continue
        if target.kind not in LINKS[source.kind]:
            allowed = ", ".join(LINKS[source.kind]) or "nothing"
            raise SettingsError(
                f"{_called(source)} cannot be linked to {_called(target)}; a {source.kind} may be linked to {allowed}."
            )
        if link in seen:
            raise SettingsError(f"{link.source} is linked to {link.target} twice; keep one of them.")
        seen.add(link)


def _check_wholeness(graph: Graph) -> None:
    """Everything can be reached by requests, and nothing that it needs is missing."""
    if not graph.workers:
        raise SettingsError("The graph has no workers; add a component worker, or decode and prefill.")
    frontend = graph.frontend
    if frontend is None:
        first = graph.router.label if graph.router is not None else graph.workers[0].label
        raise SettingsError(
            f"The graph has no frontend, so clients have nothing to ask; add frontend: {{links: [{first}]}}."
        )
    entry = _entry(graph, frontend)
    if graph.store is None:
        for needs in (graph.router, graph.planner):
            if needs is not None:
                raise SettingsError(
                    f"{_called(needs)} finds its workers in a store, and the graph has none; add store: {{}} to its "
                    f"components, or the URL of yours as store: {{url: redis://HOST:6379}}."
                )
    targets = graph.targets(entry.label)
    if not any(isinstance(t, Workers) and t.role.decodes for t in targets):
        raise SettingsError(
            f"{_called(entry)} leads to no workers that answer; link it to a component of kind decode or worker."
        )
    shared = any(isinstance(t, Prefill) for t in targets)
    for workers in graph.workers:
        _check_reachable(graph, workers, entry, shared)


def _entry(graph: Graph, frontend: Frontend) -> Component:
    """The component that chooses among workers."""
    router = graph.router
    if router is None:
        return frontend
    targets = graph.targets(frontend.label)
    if router not in targets:
        raise SettingsError(f"Nothing leads to {_called(router)}; link {frontend.label} to it, or drop it.")
    for target in targets:
        if isinstance(target, Workers):
            raise SettingsError(
                f"{frontend.label} is linked to {router.label} and to {target.label}; requests for {target.label} go "
                f"through {router.label}, so link {router.label} to it instead."
            )
    return router


def _check_reachable(graph: Graph, workers: Workers, entry: Component, shared: bool) -> None:
    """`shared`: the entry itself is linked to prefill workers, which then serve all."""
    sources = [graph.component(link.source) for link in graph.links if link.target == workers.label]
    asked = [source for source in sources if source is not None and source.kind is not Kind.PLANNER]
    if not asked:
        giver = "a decode component" if isinstance(workers, Prefill) else entry.label
        raise SettingsError(f"Nothing leads to {_called(workers)}; link {giver} to it, or drop it.")
    prefills = [target for target in graph.targets(workers.label) if isinstance(target, Prefill)]
    if isinstance(workers, Decode) and not prefills and not shared:
        raise SettingsError(
            f"{_called(workers)} has nobody that prefills for it; link it to a component of kind prefill, or make it "
            "one of kind worker, which does both."
        )
    for prefill in prefills:
        if graph.model_of(prefill) != graph.model_of(workers):
            raise SettingsError(
                f"{workers.label} serves {graph.model_of(workers)} and {prefill.label}, which is to prefill for it, "
                f"{graph.model_of(prefill)}; give both the same model."
            )


def _check_workers(graph: Graph, workers: Workers) -> None:
    if not graph.model_of(workers):
        raise SettingsError(f"{_called(workers)} has no model; add model: NAME to the graph, or to the component.")
    limits = workers.limits
    if limits.min > limits.max:
        raise SettingsError(f"limits of {workers.label}: min {limits.min} is above max {limits.max}; swap them.")
    if not limits.min <= workers.count <= limits.max:
        raise SettingsError(
            f"count of {workers.label} is {workers.count} and its limits are {limits.min} to {limits.max}; "
            "change one of them."
        )
    if workers.gpus != int(workers.gpus) and workers.gpus > 1:
        raise SettingsError(
            f"gpus of {workers.label} must be a whole number, or a fraction below 1 of a shared one, "
            f"got {workers.gpus:g}."
        )
    split = _parallel_gpus(workers.args)
    if split is not None and split != max(1, workers.gpus):
        raise SettingsError(
            f"args of {workers.label} spread the model over {split} GPUs, and gpus is {workers.gpus:g}; "
            f"set gpus: {split}."
        )


def _parallel_gpus(args: Sequence[str]) -> int | None:
    """GPUs that the arguments ask for; None when they say nothing, or nothing that can be read here."""
    sizes = program_args.parallel_sizes(args)
    if not sizes or not all(size.isdigit() for size in sizes.values()):
        return None
    product = 1
    for size in sizes.values():
        product *= int(size)
    return product


def _check_ports(graph: Graph) -> None:
    """Those that are named; 0 is a free one."""
    named: list[tuple[str, int]] = []
    if (frontend := graph.frontend) is not None and frontend.port:
        if frontend.port + frontend.count - 1 > 65535:
            raise SettingsError(
                f"{_called(frontend)} has {frontend.count} processes that listen on ports from {frontend.port} on, and "
                "65535 is the last one; choose a lower port."
            )
        named += [(frontend.label, frontend.port + number) for number in range(frontend.count)]
    if graph.store is not None and graph.store.port:
        named.append((graph.store.label, graph.store.port))
    if graph.planner is not None and (port := check_settings.planner_told(graph.planner).metrics_port):
        named.append((graph.planner.label, port))
    for (one, port), (other, its) in combinations(named, 2):
        if port == its:
            raise SettingsError(f"{one} and {other} are both to listen on port {port}; give one of them another.")


def _check_environment(component: Component) -> None:
    for name in (*component.env, *component.secrets):
        if name in _GIVEN_VARIABLES:
            raise SettingsError(
                f"{component.label} names the variable {name}, which is given by {_GIVEN_VARIABLES[name]}; drop it."
            )
        if not _VARIABLE.fullmatch(name):
            raise SettingsError(f"{component.label} names the variable {name!r}, which is no name of a variable.")
    if both := sorted(set(component.env) & set(component.secrets)):
        raise SettingsError(f"{component.label} has {both[0]} in env and in secrets; keep one of them.")


def _check_store(store: Store) -> None:
    if store.url and (store.port or store.settings or store.args):
        raise SettingsError(
            f"{_called(store)} has a url, so it is not started here, and its port, settings and args have no effect; "
            "drop them, or the url."
        )


def _called(component: Component) -> str:
    """`decode`, or `the decode component big`."""
    if component.label == component.kind:
        return f"the {component.kind}"
    return f"the {component.kind} component {component.label}"
