"""Keeps the processes of one graph as they are wanted: starts them in order, starts again what failed, scales, ends.

One event loop; what blocks runs in threads. It knows no terminal: whoever watches asks for its `status`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from vllm_pd.background import end_tasks
from vllm_pd.errors import GraphError
from vllm_pd.graph import check_machine, log_files, processes, remains, runs
from vllm_pd.graph.embedded_store import find_binary
from vllm_pd.graph.groups import Group, Groups
from vllm_pd.graph.instance import Instance
from vllm_pd.graph.machine import Machine
from vllm_pd.graph.model import Component, Frontend, Graph, Kind, Store, Workers
from vllm_pd.graph.ports import LOOPBACK, can_bind, free_port
from vllm_pd.graph.processes import Launch, Spot, Surroundings
from vllm_pd.graph.runs import RunFolder, Started
from vllm_pd.graph.status import ComponentStatus, Event, GraphState, GraphStatus
from vllm_pd.layered import redact

_THREADS = 16
_EVENTS_KEPT = 200
_LOOK_AT_LOGS_S = 10.0

_log = logging.getLogger(__name__)


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
        self._groups = Groups(graph)
        self._tasks: dict[Instance, asyncio.Task[None]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._started: dict[str, Started] = {}
        self._record_lock = asyncio.Lock()
        self._ports: set[int] = set()
        # Instances are launched in threads.
        self._ports_lock = threading.Lock()
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
            GraphError: a port is taken, a program or a model is missing, the machine is too small.
            SettingsError: a variable that a component needs is not set.
            StoreError: there is no server for the store.
        """
        places = processes.places(self.graph, self.machine)
        check_machine.check_models(self.graph)
        self._around = self._look_around()
        await self._write_record()
        for group in self._groups:
            component = group.component
            for number in range(processes.count_of(component)):
                name = processes.instance_name(component, number)
                spot = Spot(number, self._port(component, number), places.get(name, processes.NO_PLACE))
                group.instances.append(Instance(self, name, component.label, spot))
        # Whatever cannot be launched at all is refused here, and not after a model was loaded.
        for instance in self._groups.instances:
            check_machine.check_port(instance.name, self._groups[instance.component].component, instance.spot.port)
            check_machine.check_program(self.launch(instance))
        for instance in self._groups.instances:
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
            leaving = [i for component in wave for i in self._groups[component.label].instances]
            for instance in leaving:
                instance.leave()
            await asyncio.gather(*(self._tasks[i] for i in leaving if i in self._tasks), return_exceptions=True)
        if self._logs is not None:
            await end_tasks((self._logs,))
        loop = asyncio.get_running_loop()
        left = await loop.run_in_executor(self.threads, remains.living, self._record())
        self.threads.shutdown(wait=False)
        return frozenset(f"process {process.pid}" for process in left)

    # What can be asked for while it runs. Each raises GraphError or SettingsError when it cannot be done.

    def scale(self, name: str, count: int) -> str:
        """So many instances of a component are wanted from now on; returns a sentence."""
        group, component = self._scalable(name)
        limits, staying = component.limits, group.staying
        if not limits.min <= count <= limits.max:
            raise GraphError(f"{name} may have {limits.min} to {limits.max} instances, not {count}.")
        if count > len(staying):
            spots = self._groups.free_spots(group, component, count - len(staying), self.machine)
            for number, place in spots:
                spot = Spot(number, self._free_port(), place)
                instance = Instance(self, processes.instance_name(component, number), name, spot)
                group.instances.append(instance)
                self._begin(instance)
            return f"{name}: {len(staying)} -> {count}, {len(spots)} on the way."
        for instance in group.first_to_go()[: len(staying) - count]:
            instance.leave()
        return f"{name}: {len(staying)} -> {count}." if count < len(staying) else f"{name} has {count} already."

    def add(self, name: str, count: int) -> str:
        """So many more instances of a component; returns a sentence."""
        group, _ = self._scalable(name)
        return self.scale(name, len(group.staying) + count)

    def give_up(self, name: str, count: int) -> str:
        """At most so many instances that are not up are not wanted any more; returns a sentence."""
        group, component = self._scalable(name)
        count = min(count, max(0, len(group.staying) - component.limits.min))
        hopeless = [instance for instance in group.first_to_go() if not instance.is_up][:count]
        for instance in hopeless:
            instance.leave()
        return f"{name}: {', '.join(i.name for i in hopeless) or 'none'} given up."

    def remove(self, wanted: str) -> str:
        """End one worker, named as an instance or as HOST:PORT, and want one less of its component."""
        for instance in self._groups.instances:
            if wanted and wanted in (instance.name, instance.url.partition("://")[2]):
                if instance.is_leaving:
                    return f"{instance.name} is on its way out already."
                group, component = self._scalable(instance.component)
                if len(group.staying) <= component.limits.min:
                    raise GraphError(f"{group.name} may not have less than {component.limits.min} instances.")
                instance.leave()
                return f"{instance.name} finishes what it has and ends."
        raise GraphError(f"There is no worker {wanted}.")

    def restart(self, name: str) -> str:
        """Start an instance, or all of a component, anew."""
        self._refuse_at_the_end()
        chosen = [i for group in self._groups for i in group.staying if name in (i.name, group.name)]
        if not chosen:
            raise GraphError(f"There is nothing called {name}{self._groups.nearest(name)}.")
        for instance in chosen:
            instance.again()
        return f"{', '.join(instance.name for instance in chosen)}: started anew."

    def status(self) -> GraphStatus:
        """How everything is now."""
        components = self._groups.component_statuses()
        frontend = next((i for i in self._groups.of_kind(Kind.FRONTEND) if i.url), None)
        return GraphStatus(
            graph=self.graph.name,
            state=self._state(components),
            for_s=round(time.monotonic() - self._began, 1),
            namespace=self.graph.namespace,
            pid=os.getpid(),
            url=frontend.url if frontend is not None else "",
            model=self._groups.model(),
            store=redact(str(self._around.store_url)) if self._around is not None else "",
            logs=str(self.folder.logs),
            machine=str(self.machine),
            components=components,
            instances=self._groups.instance_statuses(),
            events=tuple(self._events),
        )

    # What instances need; see `instance.Host`.

    def waits_for(self, component: str) -> str:
        return self._groups.waits_for(component)

    def launch(self, instance: Instance) -> Launch:
        assert self._around is not None
        component = self._groups[instance.component].component
        if isinstance(component, Workers) and self.graph.store is not None and not can_bind(instance.spot.port):
            # Somebody took it while it was down. Without a store nobody would find it elsewhere.
            taken = instance.spot.port
            instance.spot = replace(instance.spot, port=self._free_port())
            self._ports.discard(taken)
        workers = self._groups.worker_urls()
        return processes.launch(self.graph, component, instance.spot, self._around, workers=workers)

    def log_of(self, name: str) -> Path:
        return self.folder.log(name)

    async def started(self, instance: Instance) -> None:
        process = instance.process
        if process is not None and process.leader is not None:
            leader = process.leader
            self._started[instance.name] = Started(instance.name, leader.pid, leader.started, instance.grace_s)
            await self._write_record()

    async def ended(self, instance: Instance) -> None:
        if self._started.pop(instance.name, None) is not None:
            try:
                await self._write_record()
            except OSError as e:
                # What is on the record and gone does no harm, and whoever ended is to start again.
                _log.warning("the record of processes cannot be written: %s", e)

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
        with self._ports_lock:
            while (port := free_port()) in self._ports:
                pass
            self._ports.add(port)
            return port

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
            self._ports.discard(instance.spot.port)

    def _scalable(self, name: str) -> tuple[Group, Workers]:
        self._refuse_at_the_end()
        return self._groups.scalable(name)

    def _refuse_at_the_end(self) -> None:
        if self._is_stopping:
            raise GraphError(f"The graph {self.graph.name} is being ended.")

    def _state(self, components: tuple[ComponentStatus, ...]) -> GraphState:
        if self._is_stopping:
            return GraphState.STOPPING
        if all(c.ready == c.wanted for c in components):
            self._came_up = True
            return GraphState.UP
        failed = self._came_up or self._groups.any_failed()
        return GraphState.DEGRADED if failed else GraphState.STARTING

    def _record(self) -> runs.Record:
        return runs.Record(self._run, runs.boot_id(), tuple(self._started.values()))

    async def _write_record(self) -> None:
        async with self._record_lock:
            record = self._record()
            await asyncio.get_running_loop().run_in_executor(self.threads, runs.write_record, self.folder, record)
