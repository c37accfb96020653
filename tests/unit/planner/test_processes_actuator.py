"""The actuator `processes` against a real supervisor and real processes."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from tests.conformance.actuator import DEADLINE_S, WHY, ActuatorConformance
from tests.conformance.registry import POOL
from tests.unit.graph.programs import write_programs
from vllm_pd.errors import DeposedError, SettingsError
from vllm_pd.graph.check import check
from vllm_pd.graph.control_server import ControlServer
from vllm_pd.graph.machine import Machine
from vllm_pd.graph.model import Decode, Frontend, Prefill, Router
from vllm_pd.graph.runs import CONTROL_VARIABLE, FOLDER_VARIABLE, RunFolder
from vllm_pd.graph.status import GraphState, Phase
from vllm_pd.graph.supervisor import Supervisor
from vllm_pd.planner.actuators.choose import open_actuator
from vllm_pd.planner.actuators.context import ActuatorContext
from vllm_pd.planner.actuators.processes import ProcessesActuator
from vllm_pd.planner.model import AddAction, RemoveAction
from vllm_pd.state.base import Epoch, PoolId, Role, WorkerId, WorkerRecord
from vllm_pd.state.memory_registry import MemoryRegistry
from vllm_pd.state.memory_roles import MemoryRoles

LEASE_MS = 600_000
START_S = 200.0


class As:
    """A leadership that the store confirms."""

    def __init__(self, term: int) -> None:
        self._term = term

    def term(self, pool: PoolId) -> int:
        return self._term

    async def confirm(self, pool: PoolId) -> int:
        return self._term


class SupervisedWorld:
    """Small programs in the places of workers, kept by a supervisor; the world registers those that are up."""

    pool: PoolId = POOL.id

    def __init__(self, tmp_path: Path) -> None:
        self.folder = RunFolder(tmp_path / "run").make()
        self.registry = MemoryRegistry("test")
        self.actuator = ProcessesActuator(self.folder, self.registry, deadline_s=DEADLINE_S)
        self._hold = tmp_path / "hold"
        args = (f"--hold={self._hold}",)
        chain = Frontend(port=0).link(Router()).link(Decode(2, args=args)).link(Prefill(2, args=args))
        self.supervisor = Supervisor(
            check(chain.graph("g", model="m")),
            Machine(cores=(0, 1)),
            self.folder,
            programs=write_programs(tmp_path / "programs"),
            environ={"PATH": os.environ["PATH"]},
            run=secrets.token_hex(8),
        )
        self._server = self._listener()

    def _listener(self) -> ControlServer:
        return ControlServer(self.folder, self.supervisor, asyncio.Event())

    async def start(self) -> SupervisedWorld:
        await self.supervisor.start()
        await self._server.__aenter__()
        deadline = time.monotonic() + START_S
        while self.supervisor.status().state is not GraphState.UP:
            assert time.monotonic() < deadline, self.supervisor.status()
            await asyncio.sleep(0.02)
        await self.workers()
        return self

    async def end(self) -> None:
        await self._server.__aexit__(None, None, None)
        assert not await self.supervisor.stop(now=True)

    async def another(self) -> ProcessesActuator:
        return ProcessesActuator(self.folder, self.registry, deadline_s=DEADLINE_S)

    async def workers(self) -> Mapping[WorkerId, tuple[Epoch, Role]]:
        found = {}
        for i in self.supervisor.status().instances:
            if i.phase is Phase.READY and i.component in ("prefill", "decode"):
                id, epoch, role = WorkerId(i.url.removeprefix("http://")), Epoch(i.pid), Role(i.component)
                await self.registry.heartbeat(WorkerRecord(id, epoch, POOL, i.url, role, ("m",)), LEASE_MS)
                found[id] = (epoch, role)
        return found

    async def asked_for(self, role: Role) -> int:
        return next(c.wanted for c in self.supervisor.status().components if c.name == role)

    async def was_told(self, worker: WorkerId, to: Role) -> int:
        return 0

    async def hold_starts(self) -> None:
        self._hold.touch()

    async def let_start(self) -> None:
        self._hold.unlink()

    async def cut(self) -> None:
        await self._server.__aexit__(None, None, None)

    async def heal(self) -> None:
        self._server = self._listener()
        await self._server.__aenter__()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[SupervisedWorld]:
    made = SupervisedWorld(tmp_path)
    try:
        yield await made.start()
    finally:
        await made.end()


class TestProcesses(ActuatorConformance):
    pass


async def test_a_planner_starts_and_ends_only_workers_of_what_it_is_linked_to(world: SupervisedWorld) -> None:
    actuator = ProcessesActuator(world.folder, world.registry, deadline_s=DEADLINE_S, planned=("decode",))
    refused = await actuator.act(world.pool, AddAction(Role.PREFILL, 1, WHY))
    assert not refused.ok and "has no component of prefill workers that its planner may add to" in refused.detail
    of = {role: (id, epoch) for id, (epoch, role) in (await world.workers()).items()}
    refused = await actuator.act(world.pool, RemoveAction(*of[Role.PREFILL], WHY))
    assert not refused.ok and "is of prefill, which the planner of the graph is not linked to" in refused.detail
    assert (await actuator.act(world.pool, RemoveAction(*of[Role.DECODE], WHY))).ok
    assert await world.asked_for(Role.PREFILL) == 2


async def test_a_planner_of_an_older_leadership_starts_and_ends_nothing(world: SupervisedWorld) -> None:
    older, newer = (
        ProcessesActuator(world.folder, world.registry, deadline_s=DEADLINE_S, mandate=As(term)) for term in (7, 8)
    )
    of = {role: (id, epoch) for id, (epoch, role) in (await world.workers()).items()}
    assert (await older.act(world.pool, RemoveAction(*of[Role.DECODE], WHY))).ok
    await world.hold_starts()
    assert (await newer.act(world.pool, AddAction(Role.PREFILL, 1, WHY))).ok
    for asked in (
        older.act(world.pool, AddAction(Role.PREFILL, 1, WHY)),
        older.act(world.pool, RemoveAction(*of[Role.PREFILL], WHY)),
        older.give_up(world.pool, Role.PREFILL, 1),
    ):
        with pytest.raises(DeposedError, match="later leadership"):
            await asked
    assert await world.asked_for(Role.PREFILL) == 3


async def test_a_planner_of_a_graph_knows_its_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    registry = MemoryRegistry("test")
    context = ActuatorContext("", "test", registry, MemoryRoles("test"), 30.0, 30.0)
    with pytest.raises(SettingsError, match="must know its graph \\(up are: none\\); write processes=NAME"):
        open_actuator("processes", context)
    monkeypatch.setenv(CONTROL_VARIABLE, str(tmp_path / "g"))
    assert open_actuator("processes", context).name == "processes"
