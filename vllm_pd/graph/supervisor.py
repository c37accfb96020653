"""Keeps the processes of one graph as they are wanted: starts them in order, starts again what failed, scales, ends.

One event loop; what blocks runs in threads. It knows no terminal: whoever watches asks for its `status`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_pd.errors import GraphError
from vllm_pd.graph import log_files, processes, program_args, remains, runs
from vllm_pd.graph.embedded_store import find_binary
from vllm_pd.graph.instance import Instance
from vllm_pd.graph.machine import Machine, free_place
from vllm_pd.graph.model import Component, Frontend, Graph, Kind, Store, Workers
from vllm_pd.graph.ports import LOOPBACK, can_bind, free_port
from vllm_pd.graph.processes import Launch, Spot, Surroundings
from vllm_pd.graph.runs import RunFolder, Started
from vllm_pd.graph.status import ComponentStatus, Event, GraphState, GraphStatus, Phase
from vllm_pd.layered import nearest, redact

_THREADS = 16
_EVENTS_KEPT = 200
_LOOK_AT_LOGS_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Group:
    """The instances of one component, those that are leaving among them."""

    component: Component
    instances: list[Instance] = field(default_factory=list)
    has_begun: bool = False
    """Whether what it needs was there once; what is lost later is not waited for by those that run."""

    @property
    def staying(self) -> list[Instance]:
        return [instance for instance in self.instances if not instance.is_leaving]


class Supervisor:
    """One run of a graph. `start`, then `stop`; both once.

    Args:
        graph: a checked one.
        folder: made, and locked by the caller.
        programs: folder of `vllm`, `vllm-pd-router` and `vllm-pd`.
        environ: of the processes, as far as they do not get variables of their own.
    """

    def __init__(
        self, graph: Graph, machine: Machine, folder: RunFolder, *, programs: Path, environ: Mapping[str, str], run: str
    ) -> None:
        self.graph = graph
        self.machine = machine
        self.folder = folder
        self.rule = graph.restart
        self.hurry = asyncio.Event()
        self.threads: Executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="graph")
        self._environ = environ
        self._programs = programs
        self._run = run
        self._around: Surroundings | None = None
        self._groups: dict[str, _Group] = {}
        self._needs: dict[str, frozenset[str]] = {}
        self._tasks: dict[Instance, asyncio.Task[None]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._started: dict[str, Started] = {}
        self._record_lock = asyncio.Lock()
        self._ports: set[int] = set()
        self._store_port = 0
        self._events: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self._happened = 0
        self._began = time.monotonic()
        self._is_stopping = False
        self._came_up = False
        self._logs: asyncio.Task[None] | None = None

    # Beginning and end.

    async def start(self) -> None:
        """Begin to start everything; returns at once, with what is wrong at first sight refused.

        Raises:
            GraphError: a port is taken, a program is missing, the machine is too small.
            SettingsError: a variable that a component needs is not set.
            StoreError: there is no server for the store.
        """
        places = processes.places(self.graph, self.machine)
        self._around = self._look_around()
        await self._write_record()
        for wave in processes.order(self.graph):
            for component in wave:
                group = self._groups[component.label] = _Group(component)
                self._needs[component.label] = processes.needs(self.graph, component)
                for number in range(processes.count_of(component)):
                    name = processes.instance_name(component, number)
                    place = places.get(name, processes.NO_PLACE)
                    group.instances.append(
                        Instance(self, name, component.label, Spot(number, self._port(component, number), place))
                    )
        for group in self._groups.values():
            for instance in group.instances:
                # Whatever cannot be launched at all is refused here, and not after a model was loaded.
                if not isinstance(group.component, Workers):
                    self._check_port(instance, group.component)
                _check_program(self.launch(instance))
        for group in self._groups.values():
            for instance in group.instances:
                self._begin(instance)
        self._logs = asyncio.create_task(log_files.keep_short(self.folder.logs, _LOOK_AT_LOGS_S, self.threads))

    async def stop(self, *, now: bool = False) -> frozenset[str]:
        """End everything, those first that others do not need. Returns what is left: names of processes, or nothing.

        `now`: without waiting for what is under way; may be asked for while it waits.
        """
        if now:
            self.hurry.set()
        self._is_stopping = True
        for wave in reversed(processes.order(self.graph)):
            leaving = [i for component in wave for i in self._instances(component.label)]
            for instance in leaving:
                instance.leave()
            await asyncio.gather(*(self._tasks[i] for i in leaving if i in self._tasks), return_exceptions=True)
        if self._logs is not None:
            self._logs.cancel()
            await asyncio.gather(self._logs, return_exceptions=True)
        loop = asyncio.get_running_loop()
        left = await loop.run_in_executor(self.threads, remains.living, self._record())
        self.threads.shutdown(wait=False)
        return frozenset(f"process {process.pid}" for process in left)

    # What can be asked for while it runs. Each raises GraphError or SettingsError when it cannot be done.

    def scale(self, name: str, count: int) -> str:
        """So many instances of a component are wanted from now on; returns a sentence."""
        group = self._scalable(name)
        component = group.component
        assert isinstance(component, Workers)
        limits, staying = component.limits, group.staying
        if not limits.min <= count <= limits.max:
            raise GraphError(f"{name} may have {limits.min} to {limits.max} instances, not {count}.")
        if count > len(staying):
            spots = self._new_spots(group, component, count - len(staying))
            for spot in spots:
                instance = Instance(self, processes.instance_name(component, spot.number), name, spot)
                group.instances.append(instance)
                self._begin(instance)
            return f"{name}: {len(staying)} -> {count}, {len(spots)} on the way."
        for instance in sorted(staying, key=_worth)[: len(staying) - count]:
            instance.leave()
        return f"{name}: {len(staying)} -> {count}." if count < len(staying) else f"{name} has {count} already."

    def add(self, name: str, count: int) -> str:
        """So many more instances of a component; returns a sentence."""
        return self.scale(name, len(self._scalable(name).staying) + count)

    def give_up(self, name: str, count: int) -> str:
        """At most so many instances that are not up are not wanted any more; returns a sentence."""
        hopeless = sorted((i for i in self._scalable(name).staying if not i.is_up), key=_worth)[:count]
        for instance in hopeless:
            instance.leave()
        return f"{name}: {', '.join(i.name for i in hopeless) or 'none'} given up."

    def remove(self, wanted: str) -> str:
        """End one worker, named as an instance or as HOST:PORT, and want one less of its component."""
        for group in self._groups.values():
            for instance in group.instances:
                if wanted in (instance.name, instance.url.partition("://")[2]):
                    if instance.is_leaving:
                        return f"{instance.name} is on its way out already."
                    self._scalable(group.component.label)
                    assert isinstance(group.component, Workers)
                    if len(group.staying) <= group.component.limits.min:
                        raise GraphError(
                            f"{group.component.label} may not have less than {group.component.limits.min} instances."
                        )
                    instance.leave()
                    return f"{instance.name} finishes what it has and ends."
        raise GraphError(f"There is no worker {wanted}.")

    def restart(self, name: str) -> str:
        """Start an instance, or all of a component, anew."""
        chosen = [
            instance
            for group in self._groups.values()
            for instance in group.staying
            if name in (instance.name, group.component.label)
        ]
        if not chosen:
            raise GraphError(f"There is nothing called {name}{self._nearest(name)}.")
        for instance in chosen:
            instance.again()
        return f"{', '.join(instance.name for instance in chosen)}: started anew."

    def status(self) -> GraphStatus:
        """How everything is now."""
        instances = tuple(
            i.status(is_stuck=i.phase is Phase.WAITING and self._is_stuck(name))
            for name, group in self._groups.items()
            for i in group.instances
        )
        components = tuple(self._component_status(group) for group in self._groups.values())
        frontend = next((i for i in self._instances_of(Kind.FRONTEND) if i.url), None)
        return GraphStatus(
            graph=self.graph.name,
            state=self._state(components),
            for_s=round(time.monotonic() - self._began, 1),
            namespace=self.graph.namespace,
            pid=os.getpid(),
            url=frontend.url if frontend is not None else "",
            model=self._model(),
            store=redact(str(self._around.store_url)) if self._around is not None else "",
            logs=str(self.folder.logs),
            machine=str(self.machine),
            components=components,
            instances=instances,
            events=tuple(self._events),
        )

    # What instances need; see `instance.Host`.

    def waits_for(self, component: str) -> str:
        group = self._groups[component]
        if group.has_begun:
            return ""
        for name in sorted(self._needs[component]):
            needed = self._groups[name].staying
            if not needed:
                continue
            if self._is_lost(name):
                return f"{name}, which does not come up"
            if unsettled := [i.name for i in needed if not i.is_settled]:
                return ", ".join(unsettled)
            if not any(i.is_up for i in needed):
                return name
        group.has_begun = True
        return ""

    def _is_stuck(self, component: str) -> bool:
        """Whether something that it needs will not come up by itself."""
        return any(self._is_lost(name) for name in self._needs[component])

    def _is_lost(self, component: str) -> bool:
        staying = self._groups[component].staying
        return bool(staying) and all(
            i.phase is Phase.GIVEN_UP or (i.phase is Phase.WAITING and self._is_stuck(component)) for i in staying
        )

    def launch(self, instance: Instance) -> Launch:
        assert self._around is not None
        component = self._groups[instance.component].component
        if isinstance(component, Workers) and self.graph.store is not None and not can_bind(instance.spot.port):
            # Somebody took it while it was down. Without a store nobody would find it elsewhere.
            instance.spot = replace(instance.spot, port=self._free_port())
        workers = [
            (group.component, f"http://{LOOPBACK}:{i.spot.port}")
            for group in self._groups.values()
            if isinstance(group.component, Workers)
            for i in group.staying
        ]
        return processes.launch(self.graph, component, instance.spot, self._around, workers=workers)

    def log_of(self, name: str) -> Path:
        return self.folder.log(name)

    async def started(self, instance: Instance) -> None:
        process = instance.process
        if process is not None and process.leader is not None:
            self._started[instance.name] = Started(instance.name, process.leader.pid, process.leader.started)
            await self._write_record()

    async def ended(self, instance: Instance) -> None:
        if self._started.pop(instance.name, None) is not None:
            await self._write_record()

    def happened(self, text: str) -> None:
        self._happened += 1
        self._events.append(Event(self._happened, text))
        _log.info("%s", text)

    def turn(self, instance: Instance) -> asyncio.Lock | None:
        place = instance.spot.place
        return self._turns.setdefault(place.gpus[0], asyncio.Lock()) if place.memory_fraction is not None else None

    # Parts.

    def _look_around(self) -> Surroundings:
        store = self.graph.store
        url, binary = "", None
        if store is not None and store.url:
            url = store.url
        elif store is not None:
            binary = find_binary()
            (self.folder.path / "store").mkdir(exist_ok=True)
            self._store_port = store.port or self._free_port()
            url = f"redis://{LOOPBACK}:{self._store_port}"
        return Surroundings(self._programs, self._environ, self.folder.path, self._run, url, binary)

    def _port(self, component: Component, number: int) -> int:
        if isinstance(component, Store):
            return self._store_port
        if isinstance(component, Frontend) and component.port:
            return component.port + number
        return self._free_port()

    def _free_port(self) -> int:
        """One that nobody listens on, and that no other instance was given."""
        while (port := free_port()) in self._ports:
            pass
        self._ports.add(port)
        return port

    def _check_port(self, instance: Instance, component: Component) -> None:
        port = instance.spot.port
        host = component.host if isinstance(component, Frontend) else LOOPBACK
        if isinstance(component, Frontend | Store) and not can_bind(port, host):
            raise GraphError(
                f"Port {port} of {instance.name} is taken; end what uses it, or choose another one "
                f"(--set {component.label}.port=NUMBER, 0 for a free one)."
            )

    def _begin(self, instance: Instance) -> None:
        task = asyncio.create_task(instance.run(), name=instance.name)
        self._tasks[instance] = task
        task.add_done_callback(lambda done: self._gone(instance, done))

    def _gone(self, instance: Instance, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s: the supervisor made a mistake", instance.name, exc_info=error)
            self.happened(f"{instance.name} is not watched any more, because of a mistake in the supervisor: {error!r}")
        self._tasks.pop(instance, None)
        if not self._is_stopping:
            self._groups[instance.component].instances.remove(instance)

    def _instances(self, component: str) -> list[Instance]:
        group = self._groups.get(component)
        return list(group.instances) if group is not None else []

    def _instances_of(self, kind: Kind) -> list[Instance]:
        return [i for group in self._groups.values() if group.component.kind is kind for i in group.instances]

    def _scalable(self, name: str) -> _Group:
        group = self._groups.get(name)
        if group is None:
            raise GraphError(f"There is no component {name!r}{self._nearest(name)}.")
        if not isinstance(group.component, Workers):
            raise GraphError(f"{name} is a {group.component.kind}; only workers can be scaled.")
        if self._is_stopping:
            raise GraphError(f"The graph {self.graph.name} is being ended.")
        if self.graph.store is None:
            raise GraphError(
                "The graph has no store, so its frontend knows only the workers that it was started with; "
                "add store: {} to its components."
            )
        return group

    def _new_spots(self, group: _Group, component: Workers, count: int) -> list[Spot]:
        """For further instances; those that are leaving keep their places until they are gone."""
        taken = [i.spot.place for each in self._groups.values() for i in each.instances]
        numbers = {i.spot.number for i in group.instances}
        spots: list[Spot] = []
        for _ in range(count):
            number = next(n for n in range(len(numbers) + 1) if n not in numbers)
            numbers.add(number)
            try:
                place = free_place(self.machine, taken, gpus=component.gpus, cores=component.cores)
            except GraphError as e:
                raise GraphError(
                    f"{processes.instance_name(component, number)} has no place on this machine: {e}."
                ) from None
            taken.append(place)
            spots.append(Spot(number, self._free_port(), place))
        return spots

    def _component_status(self, group: _Group) -> ComponentStatus:
        component, staying = group.component, group.staying
        limits = component.limits if isinstance(component, Workers) and self.graph.store is not None else None
        return ComponentStatus(
            name=component.label,
            kind=component.kind,
            wanted=len(staying),
            ready=sum(i.phase is Phase.READY for i in staying),
            model=self.graph.model_of(component) if isinstance(component, Workers) else "",
            min=limits.min if limits else 0,
            max=limits.max if limits else 0,
        )

    def _state(self, components: tuple[ComponentStatus, ...]) -> GraphState:
        if self._is_stopping:
            return GraphState.STOPPING
        if all(c.ready == c.wanted for c in components):
            self._came_up = True
            return GraphState.UP
        failed = any(i.failures for group in self._groups.values() for i in group.staying)
        return GraphState.DEGRADED if self._came_up or failed else GraphState.STARTING

    def _model(self) -> str:
        """What clients name: the first served name of the workers that answer."""
        for workers in self.graph.workers:
            if workers.role.decodes:
                served = program_args.value_of(workers.args, "--served-model-name")
                return served or self.graph.model_of(workers)
        return ""

    def _nearest(self, name: str) -> str:
        return nearest(name, [*self._groups, *(i.name for g in self._groups.values() for i in g.instances)])

    def _record(self) -> runs.Record:
        return runs.Record(self._run, runs.boot_id(), tuple(self._started.values()))

    async def _write_record(self) -> None:
        async with self._record_lock:
            record = self._record()
            await asyncio.get_running_loop().run_in_executor(self.threads, runs.write_record, self.folder, record)


def _check_program(launch: Launch) -> None:
    program = Path(launch.command[0])
    if not os.access(program, os.X_OK):
        extra = "install vLLM beside vllm-pd" if program.name == "vllm" else "install vllm-pd anew"
        raise GraphError(f"{launch.name} needs the program {program}, which is not there; {extra}.")


def _worth(instance: Instance) -> tuple[int, int]:
    """Those that are to go first come first: what does not work, then the newest."""
    order = [Phase.GIVEN_UP, Phase.BACKOFF, Phase.WAITING, Phase.STARTING, Phase.UNREADY, Phase.READY]
    return (order.index(instance.phase) if instance.phase in order else 0, -instance.spot.number)
