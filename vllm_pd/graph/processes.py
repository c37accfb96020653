"""The processes of a graph on one machine: in what order, with which commands, where they answer. Pure: starts nothing.

Frontend and router are one program, and the store is a process only where no URL names one that is there.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_pd.errors import GraphError
from vllm_pd.graph import check_settings, commands, program_args
from vllm_pd.graph.commands import EngineSpec, RouterSpec, WorkerSpec
from vllm_pd.graph.machine import Machine, Place, free_place
from vllm_pd.graph.model import Component, Frontend, Graph, Planner, Router, Store, Workers
from vllm_pd.graph.ports import LOOPBACK
from vllm_pd.graph.runs import CONTROL_VARIABLE, PLANS_VARIABLE, RUN_VARIABLE
from vllm_pd.layered import redact
from vllm_pd.router.settings import RouterSettings
from vllm_pd.serve_flags import DRAIN_S

STORE_VARIABLE = "VLLM_PD_STORE"
NAMESPACE_VARIABLE = "VLLM_PD_NAMESPACE"

NO_PLACE = Place()
"""Of a process that uses no part of the machine to speak of."""

_CPU_MAX_MODEL_LEN = 2048
_BLOCK_SIZE = 32
_AFTER_ROUTER_S = 5.0
_STORE_GRACE_S = 10.0
_PLANNER_GRACE_S = 10.0
_AFTER_DRAIN_S = 15.0
_ROUTER_READY_S = 120.0
_STORE_READY_S = 30.0
_PLANNER_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a graph's processes have in common on this machine.

    Attributes:
        programs: folder of `vllm`, `vllm-pd-router` and `vllm-pd`.
        environ: the environment in which the graph is started.
        store_url: "" where there is no store.
        store_binary: server that is started as store.
        folder: of the run; private.
        run: its id.
    """

    programs: Path
    environ: Mapping[str, str]
    folder: Path
    run: str
    store_url: str = ""
    store_binary: Path | None = None


@dataclass(frozen=True, slots=True)
class Spot:
    """Where one instance is: its number in the component, its port, its part of the machine."""

    number: int
    port: int
    place: Place = NO_PLACE


@dataclass(frozen=True, slots=True)
class Launch:
    """One process, ready to be started.

    Attributes:
        ready: an `http://` URL that answers 200, or a `redis://` one that answers at all; "": running is enough.
        alive: a URL of the same kind that answers as long as the process does its work, ready or not.
        url: what it serves; "" for nothing.
        ready_s: how long it may take to be ready.
        grace_s: how long it may take to end when asked to.
    """

    name: str
    component: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    ready: str
    alive: str
    url: str
    ready_s: float
    grace_s: float


def order(graph: Graph) -> list[list[Component]]:
    """The components that are processes, in waves: all that one needs are in earlier waves."""
    pending = [c for c in graph.components if not isinstance(c, Router) and not (isinstance(c, Store) and c.url)]
    waves: list[list[Component]] = []
    done: set[str] = set()
    while pending:
        wave = [c for c in pending if needs(graph, c) <= done]
        waves.append(wave)
        done |= {c.label for c in wave}
        pending = [c for c in pending if c not in wave]
    return waves


def needs(graph: Graph, component: Component) -> frozenset[str]:
    """Names of the components that must be there before this one: what it is linked to, and the store.

    Workers do not wait for each other: a decode worker whose prefill workers are not there yet computes prompts itself,
    and models that are loaded one after the other would take twice as long.
    """
    targets = [] if isinstance(component, Workers) else list(graph.targets(component.label))
    if isinstance(component, Frontend) and graph.router is not None:
        targets += graph.targets(graph.router.label)
    store = graph.store
    if store is not None and component is not store:
        targets.append(store)
    if isinstance(component, Planner) and not any(isinstance(t, Workers) for t in targets):
        targets += graph.workers
    return frozenset(t.label for t in targets if not isinstance(t, Router) and not (isinstance(t, Store) and t.url))


def count_of(component: Component) -> int:
    """How many processes the component begins with."""
    return component.count if isinstance(component, Workers | Frontend) else 1


def places(graph: Graph, machine: Machine) -> dict[str, Place]:
    """By instance name: what part of the machine each worker of the graph gets.

    Raises:
        GraphError: the machine is too small.
    """
    out: dict[str, Place] = {}
    for workers in graph.workers:
        for number in range(workers.count):
            name = f"{workers.label}-{number}"
            try:
                out[name] = free_place(machine, out.values(), gpus=workers.gpus, cores=workers.cores)
            except GraphError as e:
                raise GraphError(f"{name} has no place on this machine: {e}.") from None
    return out


def instance_name(component: Component, number: int) -> str:
    """`decode-1`; the store and the planner have one instance, which is called like them."""
    return component.label if isinstance(component, Store | Planner) else f"{component.label}-{number}"


def launch(
    graph: Graph,
    component: Component,
    spot: Spot,
    around: Surroundings,
    *,
    workers: Sequence[tuple[Workers, str]] = (),
) -> Launch:
    """One instance of a component as a process.

    Args:
        workers: the running workers and their URLs: for a frontend that has no store to find them in.

    Raises:
        SettingsError: a secret of the component is not set.
        GraphError: there is no program for it.
    """
    env = _env(graph, component, around)
    if isinstance(component, Workers):
        return _worker(graph, component, spot, around, env)
    if isinstance(component, Frontend):
        return _frontend(graph, component, spot, around, env, workers)
    if isinstance(component, Store):
        return _store(component, spot, around, env)
    if isinstance(component, Planner):
        return _planner(graph, component, around, env)
    raise GraphError(f"{component.label} is no process.")


def _env(graph: Graph, component: Component, around: Surroundings) -> dict[str, str]:
    """The variables that only this component's processes get. A router's go to the frontend, which runs it."""
    env = {RUN_VARIABLE: around.run, CONTROL_VARIABLE: str(around.folder)}
    if around.store_url and not isinstance(component, Store):
        # It may hold a password, and arguments can be read by everybody on this machine.
        env |= {STORE_VARIABLE: str(around.store_url), NAMESPACE_VARIABLE: graph.namespace}
    if isinstance(component, Frontend) and graph.router is not None:
        env |= check_settings.component_env(graph.router, around.environ)
    return env | check_settings.component_env(component, around.environ)


def _worker(graph: Graph, workers: Workers, spot: Spot, around: Surroundings, env: dict[str, str]) -> Launch:
    name = instance_name(workers, spot.number)
    told = program_args.worker_args(workers.role, workers.settings)
    args = [*told.args]
    if len(spot.place.gpus) > 1 and not program_args.parallel_sizes(workers.args):
        args += ["--tensor-parallel-size", str(len(spot.place.gpus))]
    capacity = workers.kv_blocks * _BLOCK_SIZE
    engine = EngineSpec(
        graph.model_of(workers),
        max_model_len=None if spot.place.gpus else min(_CPU_MAX_MODEL_LEN, capacity),
        block_size=_BLOCK_SIZE,
        kv_blocks=workers.kv_blocks,
        shutdown_timeout_s=None,
    )
    # Without a role there: what makes it a worker of ours is among the arguments already.
    spec = WorkerSpec(name, None, spot.port, (*args, *workers.args), {**told.env, **env})
    command = commands.worker_command(spec, engine, spot.place, programs=around.programs, store="", namespace="")
    drain = program_args.value_of(workers.args, "--shutdown-timeout") or str(DRAIN_S)
    return Launch(
        name,
        workers.label,
        tuple(command),
        commands.worker_env(spec, engine, spot.place, inherited=around.environ),
        ready=f"{spec.url}/health",
        alive=f"{spec.url}/health",
        url=spec.url,
        ready_s=workers.ready_s,
        grace_s=(float(drain) if drain.isdigit() else DRAIN_S) + _AFTER_DRAIN_S,
    )


def _frontend(
    graph: Graph,
    frontend: Frontend,
    spot: Spot,
    around: Surroundings,
    env: dict[str, str],
    workers: Sequence[tuple[Workers, str]],
) -> Launch:
    name = instance_name(frontend, spot.number)
    router = graph.router
    settings = check_settings.router_told(graph)
    told = program_args.router_args(settings)
    args = list(told.args)
    if router is None and "--policy" not in args:
        args += ["--policy", "least-loaded"]
    if not around.store_url:
        args += [part for each, url in workers for part in ("--worker", f"{url}={each.role}")]
    own = (*frontend.args, *(router.args if router is not None else ()))
    spec = RouterSpec(spot.port, name, (*args, *own), {**told.env, **env}, host=frontend.host)
    return Launch(
        name,
        frontend.label,
        tuple(commands.router_command(spec, [], programs=around.programs, store="", namespace="")),
        commands.router_env(spec, inherited=around.environ),
        ready=f"{spec.url}/ready",
        alive=f"{spec.url}/health",
        url=spec.url,
        ready_s=_ROUTER_READY_S,
        grace_s=float(settings.get("shutdown_grace", RouterSettings().shutdown_grace)) + _AFTER_ROUTER_S,
    )


def _store(store: Store, spot: Spot, around: Surroundings, env: dict[str, str]) -> Launch:
    if around.store_binary is None:
        raise GraphError(f"There is no server for the component {store.label} on this machine.")
    folder = around.folder / "store"
    # Everything in it can be rebuilt from the workers; a file of it would only be older than they are.
    lines = {"bind": LOOPBACK, "port": str(spot.port), "save": "", "appendonly": "no", "dir": str(folder)}
    lines |= check_settings.store_lines(store)
    args = [part for key, value in lines.items() for part in (f"--{key}", value)]
    url = f"redis://{LOOPBACK}:{spot.port}"
    return Launch(
        instance_name(store, spot.number),
        store.label,
        (str(around.store_binary), *args, *store.args),
        {**commands.clean_env(around.environ), **env},
        ready=url,
        alive=url,
        url=url,
        ready_s=_STORE_READY_S,
        grace_s=_STORE_GRACE_S,
    )


def _planner(graph: Graph, planner: Planner, around: Surroundings, env: dict[str, str]) -> Launch:
    told = program_args.planner_args(planner.settings)
    args = ["planner", "run", *told.args, *planner.args]
    if not program_args.value_of(args, "--actuator"):
        args += ["--actuator", "processes"]
    planned = ",".join(workers.label for workers in graph.planned)
    own = check_settings.planner_told(planner)
    host = LOOPBACK if own.metrics_host in ("0.0.0.0", "::", "localhost") else own.metrics_host
    answers = f"http://{f'[{host}]' if ':' in host else host}:{own.metrics_port}/metrics" if own.metrics_port else ""
    return Launch(
        instance_name(planner, 0),
        planner.label,
        (str(around.programs / "vllm-pd"), *args),
        {**commands.clean_env(around.environ), **told.env, **env, PLANS_VARIABLE: planned},
        ready=answers,
        alive=answers,
        url="",
        ready_s=_PLANNER_READY_S,
        grace_s=_PLANNER_GRACE_S,
    )


def shown(launch: Launch) -> str:
    """Its command line for people, without passwords."""
    return shlex.join(redact(part) if "://" in part else part for part in launch.command)
