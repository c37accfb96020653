"""The conformance suite on the actuators that need nothing but the store, a program or an HTTP server."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web

from tests.conformance.actuator import WHY, ActuatorConformance
from tests.conformance.registry import LEASE_MS, POOL
from tests.unit.planner import fleet
from tests.unit.planner.fleet import Fleet
from vllm_pd.errors import ActuatorError, SettingsError, StoreError
from vllm_pd.graph import proc_tree
from vllm_pd.planner.actuator import Actuator, Outcome
from vllm_pd.planner.actuators.choose import Actuators, check_actuator, open_actuator
from vllm_pd.planner.actuators.command import CommandActuator
from vllm_pd.planner.actuators.context import ActuatorContext
from vllm_pd.planner.actuators.role_labels import RoleLabels
from vllm_pd.planner.actuators.webhook import WebhookActuator
from vllm_pd.planner.leader import Leadership
from vllm_pd.planner.model import AddAction, MoveAction, RemoveAction
from vllm_pd.state import Epoch, PoolId, Role, WorkerId, WorkerRecord
from vllm_pd.state.base import MoveState, RoleMove
from vllm_pd.state.memory_planner_board import MemoryPlannerBoard
from vllm_pd.state.memory_registry import MemoryRegistry
from vllm_pd.state.memory_roles import MemoryRoles
from vllm_pd.state.memory_store import MemoryStore

WORKERS = {
    WorkerId(f"10.0.0.{n}:8000"): (Epoch(1_764_000_000_000 + n), Role.PREFILL if n <= 2 else Role.DECODE)
    for n in range(1, 5)
}


def record(id: WorkerId, epoch: Epoch, role: Role) -> WorkerRecord:
    return WorkerRecord(id, epoch, POOL, f"http://{id}", role, ("tiny",), nixl_host="10.0.0.1", nixl_port=5600)


class Cuttable:
    """Passes calls on, as long as it is not cut."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.is_cut = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        async def call(*args: Any, **named: Any) -> Any:
            if self.is_cut:
                raise StoreError("The store does not answer; start it.")
            return await method(*args, **named)

        return call


class RolesWorld:
    """Workers in a store in memory."""

    pool: PoolId = POOL.id

    def __init__(self) -> None:
        store = self.store = MemoryStore()
        self.registry = Cuttable(MemoryRegistry("test", store))
        self.roles = Cuttable(MemoryRoles("test", store))
        self.actuator: Actuator = self._open()
        self.wishes: list[str] = []

    def _open(self) -> Actuator:
        return RoleLabels(self.registry, self.roles, timeout_s=30.0)

    async def start(self) -> RolesWorld:
        for id, (epoch, role) in WORKERS.items():
            await self.registry.heartbeat(record(id, epoch, role), LEASE_MS)
        return self

    async def another(self) -> Actuator:
        return self._open()

    async def workers(self) -> Mapping[WorkerId, tuple[Epoch, Role]]:
        return WORKERS

    async def asked_for(self, role: Role) -> int:
        return sum(its is role for _, its in WORKERS.values())

    async def was_told(self, worker: WorkerId, to: Role) -> int:
        wish = await self.roles.of(self.pool, worker)
        if wish is not None and wish.id not in self.wishes:
            self.wishes.append(wish.id)
        return len(self.wishes) if wish is not None and wish.role is to and wish.by == "planner" else 0

    async def hold_starts(self) -> None:
        raise AssertionError("it starts nothing")

    async def let_start(self) -> None:
        raise AssertionError("it starts nothing")

    async def cut(self) -> None:
        self.registry.is_cut = self.roles.is_cut = True

    async def heal(self) -> None:
        self.registry.is_cut = self.roles.is_cut = False


class FleetWorld(RolesWorld):
    """A fleet that a program changes; its workers register."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "fleet.json"
        self.fleet = Fleet(self.file)
        with self.fleet.open() as state:
            state["workers"] = {id: [epoch, role] for id, (epoch, role) in WORKERS.items()}
        super().__init__()

    def _open(self) -> Actuator:
        program = shlex.join([sys.executable, "-S", "-E", str(Path(fleet.__file__)), str(self.file)])
        return CommandActuator(program, self.registry, deadline_s=60.0)

    async def workers(self) -> Mapping[WorkerId, tuple[Epoch, Role]]:
        with self.fleet.open() as state:
            found = {WorkerId(id): (Epoch(epoch), Role(role)) for id, (epoch, role) in state["workers"].items()}
        for id, (epoch, role) in found.items():
            await self.registry.heartbeat(record(id, epoch, role), LEASE_MS)
        return found

    async def asked_for(self, role: Role) -> int:
        with self.fleet.open() as state:
            on_their_way: int = state["starting"].get(role, 0)
            return on_their_way + sum(its == role for _, its in state["workers"].values())

    async def hold_starts(self) -> None:
        with self.fleet.open() as state:
            state["held"] = True

    async def let_start(self) -> None:
        with self.fleet.open() as state:
            state["held"] = False
            fleet.come_up(state)

    async def cut(self) -> None:
        with self.fleet.open() as state:
            state["broken"] = True

    async def heal(self) -> None:
        with self.fleet.open() as state:
            state["broken"] = False


class WebWorld(FleetWorld):
    """The same behind an HTTP server."""

    token = "a-token"

    def __init__(self, folder: Path) -> None:
        self.url = ""
        self.keys: list[str] = []
        self.opened: list[Actuator] = []
        super().__init__(folder)

    def _open(self) -> Actuator:
        self.opened.append(WebhookActuator(self.url or "http://x", self.registry, token=self.token, deadline_s=60.0))
        return self.opened[-1]

    async def start(self) -> WebWorld:
        app = web.Application()
        app.router.add_post("/scale", self._serve)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/scale"
        self.actuator = self._open()
        await super().start()
        return self

    async def stop(self) -> None:
        for each in self.opened:
            await each.close()
        await self.runner.cleanup()

    async def _serve(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401, text="who are you?")
        self.keys.append(request.headers["Idempotency-Key"])
        status, answer, complaint = self.fleet.do(await request.json())
        return web.Response(status={0: 200, fleet.REFUSED: 409}.get(status, 503), text=answer or complaint)


class TestRoles(ActuatorConformance):
    @pytest.fixture
    async def world(self) -> RolesWorld:
        return await RolesWorld().start()

    async def test_a_worker_that_a_person_moved_is_left_alone(self, world: RolesWorld) -> None:
        id, (epoch, role) = next(iter(WORKERS.items()))
        held = replace(record(id, epoch, role), move=RoleMove("x", role, "operator", MoveState.DONE, 1))
        await world.registry.heartbeat(held, LEASE_MS)
        outcome = await world.actuator.act(world.pool, MoveAction(id, epoch, Role.DECODE, WHY))
        assert not outcome.ok
        assert "by hand" in outcome.detail
        assert await world.roles.of(world.pool, id) is None


class TestCommand(ActuatorConformance):
    @pytest.fixture
    async def world(self, tmp_path: Path) -> FleetWorld:
        return await FleetWorld(tmp_path).start()


class TestWebhook(ActuatorConformance):
    @pytest.fixture
    async def world(self, tmp_path: Path) -> AsyncIterator[WebWorld]:
        world = await WebWorld(tmp_path).start()
        yield world
        await world.stop()

    async def test_every_request_has_a_key_of_its_own(self, world: WebWorld) -> None:
        for _ in range(3):
            await world.actuator.starting(world.pool)
        assert len(set(world.keys)) == 3

    async def test_a_wrong_token_is_a_refusal_that_does_not_show_it(self, world: WebWorld) -> None:
        world.token = "another"
        outcome = await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))
        assert not outcome.ok
        assert "401" in outcome.detail
        assert "a-token" not in outcome.detail

    async def test_a_server_that_does_not_know_what_is_starting_says_nothing(self, tmp_path: Path) -> None:
        world = await WebWorld(tmp_path).start()
        try:
            lost = WebhookActuator(world.url + "/nowhere", world.registry)
            assert list(await lost.starting(world.pool)) == []
            await lost.close()
        finally:
            await world.stop()


def script(folder: Path, text: str) -> str:
    path = folder / "actuator.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return shlex.quote(str(path))


ADD = AddAction(Role.DECODE, 2, "there is too much to do")


class TestPrograms:
    async def test_the_program_is_told_in_words_and_in_json(self, tmp_path: Path) -> None:
        command = script(tmp_path, f'echo "$@" > {tmp_path}/words; cat > {tmp_path}/told')
        actuator = CommandActuator(f"{command} --cluster 'a b'", RolesWorld().registry)
        assert (await actuator.act(POOL.id, ADD)).ok
        assert (tmp_path / "words").read_text() == "--cluster a b add decode 2\n"
        told = json.loads((tmp_path / "told").read_text())
        assert told == {"action": "add", "role": "decode", "count": 2, "why": ADD.why, "pool": POOL.id, "term": 0}

    async def test_it_may_refuse_and_say_why(self, tmp_path: Path) -> None:
        command = script(tmp_path, "echo working >&2; echo 'The quota is used up.' >&2; exit 3")
        outcome = await CommandActuator(command, RolesWorld().registry).act(POOL.id, ADD)
        assert not outcome.ok
        assert outcome.detail.endswith("refused to add: The quota is used up.")

    async def test_a_failure_is_not_taken_for_a_refusal(self, tmp_path: Path) -> None:
        actuator = CommandActuator(script(tmp_path, "echo boom >&2; exit 1"), RolesWorld().registry)
        with pytest.raises(ActuatorError, match=r"status 1: boom\."):
            await actuator.act(POOL.id, ADD)
        with pytest.raises(ActuatorError, match="cannot be run"):
            await CommandActuator(str(tmp_path / "nothing"), RolesWorld().registry).act(POOL.id, ADD)

    async def test_one_that_hangs_is_ended_with_all_that_it_started(self, tmp_path: Path) -> None:
        command = script(tmp_path, f"sleep 300 & echo $! > {tmp_path}/pid; wait")
        actuator = CommandActuator(command, RolesWorld().registry, deadline_s=2.0)
        with pytest.raises(ActuatorError, match="did not return within 2 s"):
            await actuator.act(POOL.id, ADD)
        pid = int((tmp_path / "pid").read_text())
        # One that was killed is gone when the machine has had time for it.
        for _ in range(1000):
            if pid not in {process.pid for process in proc_tree.everyone()}:
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("what it had started still runs")

    def test_it_runs_in_the_loop_of_a_router_too(self, tmp_path: Path) -> None:
        async def ask(text: str) -> Outcome:
            actuator = CommandActuator(script(tmp_path, text), RolesWorld().registry, deadline_s=60.0)
            try:
                return await actuator.act(POOL.id, ADD)
            finally:
                await actuator.close()

        told = uvloop.run(ask("sleep 0.1 & cat >&2"))
        assert told.ok and '"count":2' in told.detail
        assert not uvloop.run(ask("exit 3")).ok

    async def test_one_that_leaves_something_in_the_background_has_ended_all_the_same(self, tmp_path: Path) -> None:
        command = script(tmp_path, f"sleep 300 & echo $! > {tmp_path}/pid; echo 'it comes up' >&2")
        actuator = CommandActuator(command, RolesWorld().registry, deadline_s=60.0)
        outcome = await actuator.act(POOL.id, ADD)
        pid = int((tmp_path / "pid").read_text())
        try:
            assert (outcome.ok, outcome.detail) == (True, "it comes up")
            assert pid in {process.pid for process in proc_tree.everyone()}
        finally:
            os.kill(pid, signal.SIGKILL)
            await actuator.close()

    async def test_one_that_says_a_lot_is_not_held_up(self, tmp_path: Path) -> None:
        actuator = CommandActuator(script(tmp_path, "head -c 3000000 /dev/zero; exit 0"), RolesWorld().registry)
        assert (await actuator.act(POOL.id, ADD)).ok

    async def test_what_is_starting_must_be_what_was_agreed_on(self, tmp_path: Path) -> None:
        actuator = CommandActuator(script(tmp_path, """echo '[{"role": "boss"}]'"""), RolesWorld().registry)
        with pytest.raises(ActuatorError, match="something else than it should"):
            await actuator.starting(POOL.id)
        unknowing = CommandActuator(script(tmp_path, "exit 3"), RolesWorld().registry)
        assert list(await unknowing.starting(POOL.id)) == []

    async def test_an_action_of_an_older_sight_of_a_worker_does_not_reach_it(self, tmp_path: Path) -> None:
        world = await RolesWorld().start()
        actuator = CommandActuator(script(tmp_path, f"touch {tmp_path}/ran"), world.registry)
        id, (epoch, _) = next(iter(WORKERS.items()))
        assert not (await actuator.act(POOL.id, RemoveAction(id, Epoch(epoch - 1), WHY))).ok
        assert not (tmp_path / "ran").exists()


async def test_roles_are_asked_for_in_the_name_of_the_leadership_in_which_it_was_decided() -> None:
    world = await RolesWorld().start()
    board = MemoryPlannerBoard("test", world.store)
    leadership = Leadership(board, "one", 15.0)
    await leadership.stand(POOL.id)
    leadership.act_in(POOL.id, (await board.lead(POOL.id, "one", 15_000)).term)
    context = ActuatorContext("", "test", world.registry, world.roles, 30.0, 5.0, mandate=leadership)
    actuator = open_actuator("roles", context)
    (id, (epoch, _)), (other, (other_epoch, _)) = list(WORKERS.items())[1:3]
    assert (await actuator.act(POOL.id, MoveAction(id, epoch, Role.DECODE, WHY))).ok
    # It was paused, and does not know that another planner leads by now.
    await board.resign(POOL.id, "one", leadership.term(POOL.id))
    await board.lead(POOL.id, "two", 15_000)
    refused = await actuator.act(POOL.id, MoveAction(other, other_epoch, Role.PREFILL, WHY))
    assert not refused.ok and "another planner leads" in refused.detail
    assert list(await world.roles.get(POOL.id)) == [id]


class TestChoosing:
    def context(self) -> ActuatorContext:
        world = RolesWorld()
        return ActuatorContext("memory://x", "test", world.registry, world.roles, move_timeout_s=30, deadline_s=5)

    async def test_several_act_as_one_the_first_that_knows_how(self, tmp_path: Path) -> None:
        command = script(tmp_path, "exit 0")
        context = self.context()
        both = Actuators([open_actuator(name, context) for name in (f"command={command}", "roles")])
        assert both.can(ADD)
        assert both.can(MoveAction(WorkerId("a:1"), Epoch(1), Role.DECODE, WHY))
        assert (await both.act(POOL.id, ADD)).ok
        only_roles = Actuators([open_actuator("roles", context)])
        refused = await only_roles.act(POOL.id, ADD)
        assert not refused.ok
        assert "--actuator" in refused.detail
        await both.close()

    async def test_what_is_given_up_is_asked_of_whoever_has_it(self, tmp_path: Path) -> None:
        world = await FleetWorld(tmp_path).start()
        await world.hold_starts()
        both = Actuators([RoleLabels(world.registry, world.roles, timeout_s=1), world.actuator])
        assert (await both.act(POOL.id, ADD)).ok
        assert (await both.give_up(POOL.id, Role.DECODE, 5)).ok
        assert list(await both.starting(POOL.id)) == []
        assert (await both.give_up(POOL.id, Role.DECODE, 5)).ok

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("proceses", "did you mean 'processes'"),
            ("command=", "command=PROGRAM"),
            ("webhook", "webhook=URL"),
            ("roles=x", "without a value"),
        ],
    )
    def test_wrong_names_are_refused_with_the_nearest(self, text: str, problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            check_actuator(text)
        with pytest.raises(SettingsError, match=problem):
            open_actuator(text, self.context())

    async def test_what_a_webhook_s_url_keeps_secret_is_not_told(self) -> None:
        url = "http://joe:pass-word@127.0.0.1:9/services/path-secret?key=query-secret"
        webhook = WebhookActuator(url, RolesWorld().registry, deadline_s=5.0)
        with pytest.raises(ActuatorError) as failed:
            await webhook.act(POOL.id, ADD)
        await webhook.close()
        assert "http://127.0.0.1:9 " in str(failed.value)
        assert not [secret for secret in ("pass-word", "path-secret", "query-secret") if secret in str(failed.value)]

    @pytest.mark.parametrize("url", ["http://", "http:///path-secret", "https://host:port/path-secret"])
    def test_a_webhook_needs_a_host(self, url: str) -> None:
        with pytest.raises(SettingsError, match="host") as failed:
            WebhookActuator(url, RolesWorld().registry)
        assert "path-secret" not in str(failed.value)

    def test_a_webhook_must_be_a_url_and_its_password_is_not_shown(self) -> None:
        with pytest.raises(SettingsError, match="must be http://") as refused:
            open_actuator("webhook=ftp://me:secret@host/x", self.context())
        assert "secret" not in str(refused.value)
