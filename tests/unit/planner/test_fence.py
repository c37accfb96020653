"""A planner that lost its leadership without knowing starts and ends nothing, whatever carries it out."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.conformance.registry import POOL
from tests.unit.planner.loop_world import LEASE_S, Member, Script, World
from vllm_pd.errors import DeposedError
from vllm_pd.graph import control
from vllm_pd.graph.control import InTheNameOf
from vllm_pd.graph.control_server import ControlServer
from vllm_pd.graph.runs import RunFolder
from vllm_pd.planner.actuator import Actuator
from vllm_pd.planner.actuators.choose import open_actuator
from vllm_pd.planner.actuators.command import TERM_VARIABLE
from vllm_pd.planner.actuators.context import ActuatorContext
from vllm_pd.planner.actuators.webhook import TERM_HEADER
from vllm_pd.planner.model import AddAction, GiveUp, Plan
from vllm_pd.state import Role

ADD = AddAction(Role.DECODE, 1, "a test wants it")
GIVE_UP = Plan(
    0.0, give_up=(GiveUp(Role.DECODE, 1, "it did not come up"),), verdict="One is given up.", numbers={"n": 1}
)


@pytest.fixture
async def world() -> World:
    return await World().start()


async def leading(world: World) -> Member:
    """A planner in the middle of a step."""
    one = world.planner("one", Script())
    await one.round()
    led = one.leadership.led(POOL.id)
    assert led is not None
    one.leadership.act_in(POOL.id, led.term)
    return one


async def replaced(world: World, one: Member) -> None:
    """Another planner leads; the one has not heard of it."""
    await one.board.resign(POOL.id, "one", one.leadership.term(POOL.id))
    await world.planner("other", Script()).round()


class TestConfirming:
    async def test_the_store_confirms_the_leader(self, world: World) -> None:
        one = await leading(world)
        led = one.leadership.led(POOL.id)
        assert led is not None
        assert await one.leadership.confirm(POOL.id) == led.term

    async def test_one_that_does_not_know_that_another_leads_is_told_by_the_store(self, world: World) -> None:
        one = await leading(world)
        await replaced(world, one)
        assert one.leadership.led(POOL.id) is not None
        with pytest.raises(DeposedError, match="other leads pool"):
            await one.leadership.confirm(POOL.id)

    async def test_a_store_that_does_not_answer_confirms_nothing(self, world: World) -> None:
        one = await leading(world)
        world.away = True
        with pytest.raises(DeposedError, match="could not be asked"):
            await one.leadership.confirm(POOL.id)

    async def test_one_that_stood_still_while_it_asked_is_not_confirmed(self, world: World) -> None:
        one = await leading(world)
        leader = one.board.leader

        class Slow:
            async def leader(self, pool: object) -> object:
                answer = await leader(pool)
                world.now += LEASE_S
                return answer

        one.leadership._board = Slow()  # type: ignore[assignment]
        with pytest.raises(DeposedError, match="about to end"):
            await one.leadership.confirm(POOL.id)

    async def test_what_was_decided_in_an_older_leadership_of_the_same_planner_is_not_begun(self, world: World) -> None:
        one = await leading(world)
        world.now += LEASE_S + 1
        await one.leadership.stand(POOL.id)
        assert one.leadership.led(POOL.id) is not None
        with pytest.raises(DeposedError, match="does not lead any more"):
            await one.leadership.confirm(POOL.id)

    @pytest.mark.parametrize("plan", [Plan(0.0, (ADD,), verdict="One is added.", numbers={"n": 1}), GIVE_UP])
    async def test_a_step_tells_what_was_not_begun_for_that(self, world: World, plan: Plan) -> None:
        one = world.planner("one", Script(plan=plan))

        async def deposed(*args: object) -> None:
            raise DeposedError("other leads pool x by now.")

        one.actuator.act = one.actuator.give_up = deposed  # type: ignore[assignment,method-assign]
        await one.round()
        (done,) = (await one.newest()).done
        assert (done.did, done.detail) == ("lost", "other leads pool x by now.")


class Board:
    """In the place of a supervisor."""

    def __init__(self, began: list[Mapping[str, object]]) -> None:
        self._began = began

    def add(self, component: str, count: int) -> str:
        self._began.append({"add": component})
        return "It is on its way."

    def give_up(self, component: str, count: int) -> str:
        self._began.append({"give_up": component})
        return "It is given up."

    def remove(self, instance: str) -> str:
        self._began.append({"remove": instance})
        return "It ends."


Asked = Callable[[], list[Mapping[str, object]]]
"""What has reached the world, `starting` left out."""


@asynccontextmanager
async def by_command(opened: Callable[[str], Actuator], folder: Path) -> AsyncIterator[tuple[Actuator, Asked]]:
    program, told, terms = folder / "program.sh", folder / "told", folder / "terms"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = starting ] && echo \'[{{"role": "decode", "count": 1}}]\' && exit 0\n'
        f"cat >> {told}; echo >> {told}; echo ${TERM_VARIABLE} >> {terms}\n"
    )
    program.chmod(0o755)

    def asked() -> list[Mapping[str, object]]:
        found = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
        assert (terms.read_text().split() if found else []) == [str(each["term"]) for each in found]
        return found

    actuator = opened(f"command={shlex.quote(str(program))}")
    yield actuator, asked
    await actuator.close()


@asynccontextmanager
async def by_webhook(opened: Callable[[str], Actuator], folder: Path) -> AsyncIterator[tuple[Actuator, Asked]]:
    began: list[Mapping[str, object]] = []

    async def serve(request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["action"] == "starting":
            return web.json_response([{"role": "decode", "count": 1}])
        assert request.headers[TERM_HEADER] == str(asked["term"])
        began.append(asked)
        return web.Response()

    app = web.Application()
    app.router.add_post("/", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    actuator = opened(f"webhook=http://127.0.0.1:{runner.addresses[0][1]}/")
    yield actuator, lambda: began
    await actuator.close()
    await runner.cleanup()


@pytest.mark.parametrize("way", [by_command, by_webhook])
async def test_programs_are_told_the_leadership_and_are_not_asked_by_one_that_was_replaced(
    world: World, tmp_path: Path, way: Callable[..., AbstractAsyncContextManager[tuple[Actuator, Asked]]]
) -> None:
    one = await leading(world)
    term = one.leadership.term(POOL.id)
    context = ActuatorContext("", "test", world.registry, world.roles, 30.0, 30.0, mandate=one.leadership)
    async with way(lambda text: open_actuator(text, context), tmp_path) as (actuator, asked):
        assert (await actuator.act(POOL.id, ADD)).ok
        assert (await actuator.give_up(POOL.id, Role.DECODE, 1)).ok
        begun = [(each["action"], each["term"]) for each in asked()]
        assert begun == [("add", term), ("give_up", term)]
        await replaced(world, one)
        for more in (actuator.act(POOL.id, ADD), actuator.give_up(POOL.id, Role.DECODE, 1)):
            with pytest.raises(DeposedError):
                await more
        assert [(each["action"], each["term"]) for each in asked()] == begun


async def test_a_supervisor_refuses_an_older_leadership_than_it_has_seen(tmp_path: Path) -> None:
    folder, began = RunFolder(tmp_path / "g").make(), list[Mapping[str, object]]()
    older, newer, other_pool, person = InTheNameOf("a", 7), InTheNameOf("a", 8), InTheNameOf("b", 3), None
    asked = [
        control.Add("decode", 1, older),
        control.Add("decode", 1, newer),
        control.Add("decode", 1, older),
        control.GiveUp("decode", 1, older),
        control.Remove("decode-0", older),
        control.Remove("decode-0", newer),
        control.Add("decode", 1, other_pool),
        control.Add("decode", 1, person),
    ]
    async with ControlServer(folder, Board(began), asyncio.Event()):  # type: ignore[arg-type]
        replies = [await control.ask_soon(folder, each) for each in asked]
    assert [each.ok for each in replies] == [True, True, False, False, False, True, True, True]
    assert [each.is_deposed for each in replies] == [not each.ok for each in replies]
    assert len(began) == 5
