"""Whether what the components of a graph are told is understood by their programs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllm_pd import layered
from vllm_pd.errors import SettingsError
from vllm_pd.graph import program_args
from vllm_pd.graph.model import Component, Graph, Planner, Store, Workers
from vllm_pd.planner import settings as planner_settings
from vllm_pd.planner.settings import PlannerSettings
from vllm_pd.router import settings as router_settings
from vllm_pd.router.settings import RouterSettings
from vllm_pd.settings import WorkerSettings, load_worker_settings

_ROUTER_OWN = {
    "host": "host of the frontend",
    "port": "port of the frontend",
    "store": "the store component",
    "namespace": "namespace of the graph",
    "workers": "the links of the graph",
}
_WORKER_OWN = {
    "role": "the component's kind",
    "store": "the store component",
    "namespace": "namespace of the graph",
    "advertise_url": "the place that the worker gets",
}
_PLANNER_OWN = {"store": "the store component", "namespace": "namespace of the graph"}
"""Settings that the graph gives, and by what."""

_SERVE_OWN = {
    "--host": "the graph starts all workers on this machine",
    "--port": "the graph chooses it",
    "--model": "name it as model of the component",
    "--role": "it is the component's kind",
    "--kv-connector": "the graph sets it",
    "--kv-transfer-config": "put what is in it into settings of the component",
    "--pd-config": "put what is in it into settings of the component",
    "--pd-store": "it is the store component",
    "--pd-namespace": "it is the namespace of the graph",
    "--pd-advertise-url": "the graph chooses it",
}
_ROUTER_FLAGS = {"--host", "--port", "--store", "--namespace", "--worker", "--config"}
_PLANNER_FLAGS = {"--store", "--namespace", "--config"}
_STORE_OWN = {
    "port": "port of the store",
    "bind": "the graph",
    "dir": "the graph",
    "daemonize": "the graph, which watches it",
    "requirepass": "the graph: here it listens on this machine only, on Kubernetes it comes from the Secret",
}

# Where a check wants to know how workers are found: any URL does.
_SOME_STORE = "redis://127.0.0.1:6379"


def check(graph: Graph) -> None:
    """Raises SettingsError when a component is told something that its program does not know or cannot do."""
    _check_router(graph)
    for workers in graph.workers:
        _check_worker(workers)
    if graph.planner is not None:
        planner_told(graph.planner)
    if (store := graph.store) is not None:
        store_lines(store)
        _refuse_flags(store.args, [f"--{name}" for name in _STORE_OWN], f"args of {store.label}")


def planner_told(planner: Planner) -> PlannerSettings:
    """What a planner is told by its settings and arguments. Where nobody is named who starts workers, this machine
    does. Raises SettingsError."""
    where = f"settings of {planner.label}"
    known = layered.check_keys(planner.settings, list(layered.settings_of(PlannerSettings)), where)
    _refuse(known, _PLANNER_OWN, where)
    args = f"args of {planner.label}"
    _refuse_flags(planner.args, _PLANNER_FLAGS, args)
    flags = program_args.told_by(PlannerSettings, planner.args, args)
    file = {"actuators": ["processes"], **known, "store": _SOME_STORE}
    return planner_settings.load(flags=flags, file=file, file_name=where).value


def store_lines(store: Store) -> dict[str, str]:
    """The lines of its configuration file that a store is told, by their first words. Raises SettingsError."""
    where = f"settings of {store.label}"
    lines = {}
    for key, value in store.settings.items():
        name = str(key).lower()
        _refuse({name: value}, _STORE_OWN, where)
        # YAML reads its yes and no as true and false.
        text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
        if not isinstance(value, str | int | float) or not text.isprintable():
            raise SettingsError(f"{name} in {where} must be a text or a number on one line, got {value!r}.")
        lines[name] = text
    return lines


def router_told(graph: Graph) -> dict[str, Any]:
    """The settings of `vllm-pd-router`: those of the frontend and of the router together."""
    told: dict[str, Any] = {}
    for component in (graph.frontend, graph.router):
        if component is None:
            continue
        where = f"settings of {component.label}"
        known = layered.check_keys(component.settings, list(layered.settings_of(RouterSettings)), where)
        _refuse(known, _ROUTER_OWN, where)
        if twice := sorted(set(told) & set(known)):
            raise SettingsError(f"{twice[0]} is set for the frontend and for the router, which are one program here.")
        told |= {name: value for name, value in known.items() if value is not None}
    return told


def _check_router(graph: Graph) -> None:
    told = router_told(graph)
    names = " and ".join(c.label for c in (graph.frontend, graph.router) if c is not None)
    flags: dict[str, Any] = {}
    for component in (graph.frontend, graph.router):
        if component is not None:
            args = f"args of {component.label}"
            _refuse_flags(component.args, _ROUTER_FLAGS, args)
            flags |= program_args.told_by(RouterSettings, component.args, args)
    router_settings.load(flags=flags, file=told | {"store": _SOME_STORE}, file_name=f"settings of {names}")


def _check_worker(workers: Workers) -> None:
    where = f"settings of {workers.label}"
    known = layered.check_keys(workers.settings, list(layered.settings_of(WorkerSettings)), where)
    _refuse(known, _WORKER_OWN, where)
    load_worker_settings(file=known, file_name=where)
    for flag in _flags(workers.args):
        if flag in _SERVE_OWN:
            raise SettingsError(f"args of {workers.label} hold {flag}, and {_SERVE_OWN[flag]}; drop it.")
    program_args.check_serve_args(workers.args, f"args of {workers.label}")


def _refuse(settings: Mapping[str, Any], own: Mapping[str, str], where: str) -> None:
    for name in settings:
        if name in own:
            raise SettingsError(f"{where} set {name}, which is given by {own[name]}; drop it.")


def _refuse_flags(args: Sequence[str], own: Collection[str], where: str) -> None:
    for flag in _flags(args):
        if flag in own:
            raise SettingsError(f"{where} hold {flag}, which the graph gives; drop it.")


def _flags(args: Sequence[str]) -> list[str]:
    return [arg.partition("=")[0].replace("_", "-") for arg in args if arg.startswith("--")]


def component_env(component: Component, environ: Mapping[str, str]) -> dict[str, str]:
    """The component's own variables, its secrets with the values that they have in `environ`.

    Raises:
        SettingsError: a secret is not set there.
    """
    env = dict(component.env)
    for name in component.secrets:
        if not environ.get(name):
            raise SettingsError(f"{component.label} needs the variable {name}, which is not set; set it and try again.")
        env[name] = environ[name]
    return env
