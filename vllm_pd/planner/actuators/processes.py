"""Starts and ends the workers of a graph on this machine, through the graph's supervisor (`vllm-pd up`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from vllm_pd.errors import ActuatorError, DeposedError, GraphError, SettingsError, StoreError
from vllm_pd.graph import control, runs
from vllm_pd.graph.control import Add, AskStatus, GiveUp, InTheNameOf, Remove, Reply, Request
from vllm_pd.graph.model import Kind
from vllm_pd.graph.runs import RunFolder
from vllm_pd.graph.status import ComponentStatus, GraphStatus, InstanceStatus, Phase
from vllm_pd.planner.actuator import Outcome
from vllm_pd.planner.actuators.context import ActuatorContext
from vllm_pd.planner.actuators.known_start import another_start
from vllm_pd.planner.mandate import ANYBODY, Mandate
from vllm_pd.planner.model import Action, AddAction, MoveAction, RemoveAction, StartView
from vllm_pd.state.base import PoolId, Registry, Role

_ROLES = {Kind.PREFILL: Role.PREFILL, Kind.DECODE: Role.DECODE, Kind.WORKER: Role.BOTH}
_UP = (Phase.READY, Phase.UNREADY)
_GOING = (Phase.STOPPING, Phase.ENDED)


class ProcessesActuator:
    """Adds and removes workers of one graph. A new one belongs to a component of the role that is asked for.

    Args:
        folder: of the graph's run.
        registry: where the workers of a pool are found. Stays open.
        deadline_s: of one call, seconds.
        planned: names of the components whose workers it may start and end; empty for all.
        mandate: in whose name it acts; the supervisor refuses an older leadership than it has seen.
    """

    name = "processes"

    def __init__(
        self,
        folder: RunFolder,
        registry: Registry,
        *,
        deadline_s: float = 30.0,
        planned: Collection[str] = (),
        mandate: Mandate = ANYBODY,
    ) -> None:
        self._folder = folder
        self._registry = registry
        self._deadline_s = deadline_s
        self._planned = frozenset(planned)
        self._mandate = mandate

    def can(self, action: Action) -> bool:
        return isinstance(action, AddAction | RemoveAction)

    async def act(self, pool: PoolId, action: Action) -> Outcome:
        match action:
            case AddAction():
                components = await self._components(pool, action.role)
                if not components:
                    return Outcome(
                        False,
                        f"The graph {self._folder.graph} has no component of {action.role} workers that its planner "
                        "may add to.",
                    )
                # Where there are several, one that has room; where none has, the answer says so.
                fitting = [c for c in components if c.wanted + action.count <= c.max]
                by = await self._confirmed(pool)
                return await self._do(Add((fitting or components)[0].name, action.count, by))
            case RemoveAction():
                if (refused := await another_start(self._registry, pool, action)) is not None:
                    return refused
                return await self._remove(pool, action)
            case MoveAction():
                return Outcome(False, "A supervisor starts and ends workers; roles are moved by the actuator roles.")

    async def starting(self, pool: PoolId) -> Sequence[StartView]:
        status = await self._status()
        found = []
        for component in await self._of_pool(pool, status):
            waited = [i for i in _members(status, component) if i.phase not in _UP and i.phase not in _GOING]
            if waited:
                found.append(StartView(_ROLES[component.kind], len(waited), max(i.down_for_s for i in waited)))
        return found

    async def give_up(self, pool: PoolId, role: Role, count: int) -> Outcome:
        status = await self._status()
        outcome = Outcome(True, "Nothing of the kind is on its way any more.")
        for component in await self._components(pool, role):
            waited = sum(i.phase not in _UP and i.phase not in _GOING for i in _members(status, component))
            if count > 0 and waited:
                by = await self._confirmed(pool)
                outcome = await self._do(GiveUp(component.name, min(count, waited), by))
                if not outcome.ok:
                    return outcome
                count -= min(count, waited)
        return outcome

    async def close(self) -> None:
        """Every question is a connection of its own: nothing is held."""

    async def _confirmed(self, pool: PoolId) -> InTheNameOf | None:
        term = await self._mandate.confirm(pool)
        return InTheNameOf(pool, term) if term else None

    async def _remove(self, pool: PoolId, action: RemoveAction) -> Outcome:
        status = await self._status()
        owner = next((i.component for i in status.instances if i.url.partition("://")[2] == action.worker), "")
        if owner and not self._may(owner):
            return Outcome(False, f"{action.worker} is of {owner}, which the planner of the graph is not linked to.")
        return await self._do(Remove(action.worker, await self._confirmed(pool)))

    async def _components(self, pool: PoolId, role: Role) -> list[ComponentStatus]:
        return [c for c in await self._of_pool(pool, await self._status()) if _ROLES[c.kind] is role]

    async def _of_pool(self, pool: PoolId, status: GraphStatus) -> list[ComponentStatus]:
        """The components of the pool's workers: those of a model that some worker of the pool was started with."""
        workers = [c for c in status.components if c.kind in _ROLES and self._may(c.name)]
        if len({c.model for c in workers}) <= 1:
            return workers
        try:
            snapshot = await self._registry.snapshot()
        except StoreError as e:
            raise ActuatorError(f"Which workers are of pool {pool} could not be asked: {e}") from None
        ids = {str(w.record.id) for w in snapshot.workers if w.record.pool.id == pool}
        models = {c.model for c in workers if any(i.url.partition("://")[2] in ids for i in _members(status, c))}
        return [c for c in workers if c.model in models]

    def _may(self, component: str) -> bool:
        return not self._planned or component in self._planned

    async def _status(self) -> GraphStatus:
        reply = await self._ask(AskStatus())
        if reply.status is None:
            raise ActuatorError(f"The supervisor of {self._folder.graph} did not say how it is: {reply.detail}")
        return reply.status

    async def _do(self, request: Request) -> Outcome:
        reply = await self._ask(request)
        if reply.is_deposed:
            raise DeposedError(reply.detail)
        return Outcome(reply.ok, reply.detail)

    async def _ask(self, request: Request) -> Reply:
        try:
            return await control.ask_soon(self._folder, request, timeout_s=self._deadline_s)
        except GraphError as e:
            raise ActuatorError(f"{e} What came of the action is not known.") from None


def open_actuator(argument: str, context: ActuatorContext) -> ProcessesActuator:
    """For `processes` or `processes=GRAPH`. Without a name it is the graph that this process belongs to, or else the
    only one that is up on this machine.

    Raises:
        SettingsError: none, or several are.
    """
    # Of another graph than its own it may start and end all.
    planned = "" if argument else os.environ.get(runs.PLANS_VARIABLE, "")
    return ProcessesActuator(
        _folder(argument),
        context.registry,
        deadline_s=context.deadline_s,
        planned=[name for name in planned.split(",") if name],
        mandate=context.mandate,
    )


def _folder(graph: str) -> RunFolder:
    if graph:
        return runs.folder_of(graph, os.environ)
    if own := os.environ.get(runs.CONTROL_VARIABLE):
        return RunFolder(Path(own))
    up = runs.known(os.environ)
    if len(up) != 1:
        found = ", ".join(folder.graph for folder in up) or "none"
        raise SettingsError(f"The actuator processes must know its graph (up are: {found}); write processes=NAME.")
    return up[0]


def _members(status: GraphStatus, component: ComponentStatus) -> list[InstanceStatus]:
    return [i for i in status.instances if i.component == component.name]
