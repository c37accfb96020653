"""What every `Actuator` must do. A test module subclasses it; `world` is a fixture.

Kinds of action that the actuator cannot do (`can`) are skipped, except that it must refuse them in a sentence.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import pytest

from vllm_pd.errors import ActuatorError
from vllm_pd.planner.actuator import Actuator, Outcome
from vllm_pd.planner.model import Action, AddAction, MoveAction, RemoveAction
from vllm_pd.state.base import Epoch, PoolId, Role, WorkerId

DEADLINE_S = 60.0
"""For what takes a moment; never how long something should take."""
_POLL_S = 0.02
WHY = "because of a test: 2 < 3"


class ActuatorWorld(Protocol):
    """What an actuator acts on, so that its effect can be seen. The fixture ends all of it.

    At the beginning there are at least two workers of each of the roles prefill and decode, up and serving nothing.
    """

    pool: PoolId
    actuator: Actuator
    """The one under test."""

    async def another(self) -> Actuator:
        """A second one on the same world, as another planner's process has it."""

    async def workers(self) -> Mapping[WorkerId, tuple[Epoch, Role]]:
        """Those that are up and have not been told to go."""

    async def asked_for(self, role: Role) -> int:
        """How many workers of this role the world is to have now, those on their way included."""

    async def was_told(self, worker: WorkerId, to: Role) -> int:
        """How often a worker was told to take a role, where that can be counted; else 1 once it was."""

    async def hold_starts(self) -> None:
        """From now on workers that are started do not come up until `let_start`."""

    async def let_start(self) -> None:
        """What was started may come up."""

    async def cut(self) -> None:
        """What the actuator talks to does not answer any more."""

    async def heal(self) -> None:
        """It answers again."""


async def _until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for it, with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not await holds():
        assert time.monotonic() < deadline, f"it did not happen: {what}"
        await asyncio.sleep(_POLL_S)


def _refused(outcome: Outcome) -> None:
    """Not done, and said in a sentence why."""
    assert not outcome.ok
    assert re.search(r"\w+ .*\w", outcome.detail), f"no sentence: {outcome.detail!r}"


async def one_of(world: ActuatorWorld, role: Role) -> tuple[WorkerId, Epoch]:
    """The first worker of a role."""
    found = sorted((id, epoch) for id, (epoch, its) in (await world.workers()).items() if its is role)
    assert len(found) >= 2, "a world begins with two workers of each role"
    return found[0]


async def starting(world: ActuatorWorld, role: Role, actuator: Actuator | None = None) -> int:
    """How many workers of a role the actuator says are on their way."""
    found = await (actuator or world.actuator).starting(world.pool)
    for start in found:
        assert start.count >= 0
        assert start.for_s >= 0
    return sum(start.count for start in found if start.role is role)


def _examples(id: WorkerId, epoch: Epoch) -> Sequence[Action]:
    return (MoveAction(id, epoch, Role.DECODE, WHY), AddAction(Role.DECODE, 1, WHY), RemoveAction(id, epoch, WHY))


def _needs(world: ActuatorWorld, kind: type[Action]) -> None:
    examples = _examples(WorkerId("a:1"), Epoch(1))
    if not any(isinstance(each, kind) and world.actuator.can(each) for each in examples):
        pytest.skip(f"{world.actuator.name} does not know {kind.__name__}")


class ActuatorConformance:
    """Inherit where there is a fixture `world`."""

    async def test_it_has_a_name_for_metrics_and_settings(self, world: ActuatorWorld) -> None:
        assert re.fullmatch(r"[a-z][a-z_]*", world.actuator.name)

    async def test_what_it_cannot_do_it_refuses_in_a_sentence(self, world: ActuatorWorld) -> None:
        id, epoch = await one_of(world, Role.PREFILL)
        before = await world.workers()
        for action in _examples(id, epoch):
            if not world.actuator.can(action):
                _refused(await world.actuator.act(world.pool, action))
        assert await world.workers() == before

    async def test_a_move_is_told_to_the_worker_once_however_often_it_is_asked(self, world: ActuatorWorld) -> None:
        _needs(world, MoveAction)
        id, epoch = await one_of(world, Role.PREFILL)
        move = MoveAction(id, epoch, Role.DECODE, WHY)
        assert (await world.actuator.act(world.pool, move)).ok
        assert (await (await world.another()).act(world.pool, move)).ok

        async def told() -> bool:
            return await world.was_told(id, Role.DECODE) == 1

        await _until(told, f"{id} was told")

    async def test_a_move_meant_for_another_start_of_the_worker_changes_nothing(self, world: ActuatorWorld) -> None:
        _needs(world, MoveAction)
        id, epoch = await one_of(world, Role.PREFILL)
        older = MoveAction(id, Epoch(epoch - 1), Role.DECODE, WHY)
        _refused(await world.actuator.act(world.pool, older))
        assert await world.was_told(id, Role.DECODE) == 0

    async def test_a_worker_that_is_not_there_is_not_moved_or_removed(self, world: ActuatorWorld) -> None:
        before = await world.workers()
        for action in _examples(WorkerId("192.0.2.7:1"), Epoch(1)):
            if not isinstance(action, AddAction) and world.actuator.can(action):
                _refused(await world.actuator.act(world.pool, action))
        assert await world.workers() == before

    async def test_workers_are_added_by_count_and_are_starting_until_they_are_up(self, world: ActuatorWorld) -> None:
        _needs(world, AddAction)
        before, wanted = await world.workers(), await world.asked_for(Role.DECODE)
        others = await world.asked_for(Role.PREFILL)
        assert await starting(world, Role.DECODE) == 0
        await world.hold_starts()
        assert (await world.actuator.act(world.pool, AddAction(Role.DECODE, 2, WHY))).ok
        assert await world.asked_for(Role.DECODE) == wanted + 2
        assert await world.asked_for(Role.PREFILL) == others
        assert await starting(world, Role.DECODE) == 2
        assert await starting(world, Role.PREFILL) == 0
        assert (await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        assert await starting(world, Role.DECODE) == 3
        await world.let_start()

        async def all_up() -> bool:
            new = [role for id, (_, role) in (await world.workers()).items() if id not in before]
            return new == [Role.DECODE] * 3 and await starting(world, Role.DECODE) == 0

        await _until(all_up, "three more workers are up")

    async def test_another_planner_sees_what_is_starting(self, world: ActuatorWorld) -> None:
        _needs(world, AddAction)
        await world.hold_starts()
        assert (await world.actuator.act(world.pool, AddAction(Role.PREFILL, 1, WHY))).ok
        assert await starting(world, Role.PREFILL, await world.another()) == 1

    async def test_a_removed_worker_goes_and_no_other_however_often_it_is_asked(self, world: ActuatorWorld) -> None:
        _needs(world, RemoveAction)
        id, epoch = await one_of(world, Role.DECODE)
        before, wanted = await world.workers(), await world.asked_for(Role.DECODE)
        remove = RemoveAction(id, epoch, WHY)
        assert (await world.actuator.act(world.pool, remove)).ok
        # It may be gone already, and then there is nobody of that name to remove.
        await (await world.another()).act(world.pool, remove)

        async def gone() -> bool:
            return set(before) - set(await world.workers()) == {id}

        await _until(gone, f"{id} is gone")
        assert await world.asked_for(Role.DECODE) == wanted - 1

    async def test_a_removal_meant_for_another_start_of_the_worker_changes_nothing(self, world: ActuatorWorld) -> None:
        _needs(world, RemoveAction)
        id, epoch = await one_of(world, Role.DECODE)
        before = await world.workers()
        _refused(await world.actuator.act(world.pool, RemoveAction(id, Epoch(epoch - 1), WHY)))
        assert await world.workers() == before

    async def test_what_does_not_come_up_is_given_up_and_the_others_stay(self, world: ActuatorWorld) -> None:
        _needs(world, AddAction)
        before, wanted = await world.workers(), await world.asked_for(Role.PREFILL)
        await world.hold_starts()
        assert (await world.actuator.act(world.pool, AddAction(Role.PREFILL, 2, WHY))).ok
        assert (await world.actuator.give_up(world.pool, Role.PREFILL, 2)).ok

        async def given_up() -> bool:
            return await starting(world, Role.PREFILL) == 0 and await world.asked_for(Role.PREFILL) == wanted

        await _until(given_up, "nothing is waited for")
        assert await world.workers() == before

    async def test_there_is_nothing_to_give_up_where_nothing_is_starting(self, world: ActuatorWorld) -> None:
        _needs(world, AddAction)
        before, wanted = await world.workers(), await world.asked_for(Role.DECODE)
        await world.actuator.give_up(world.pool, Role.DECODE, 1)
        assert await world.asked_for(Role.DECODE) == wanted
        assert await world.workers() == before

    async def test_it_says_so_when_it_cannot_tell_what_came_of_an_action(self, world: ActuatorWorld) -> None:
        id, epoch = await one_of(world, Role.PREFILL)
        before = await world.workers()
        doable = [action for action in _examples(id, epoch) if world.actuator.can(action)]
        await world.cut()
        for action in doable:
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(ActuatorError, match=r"\w+ .*\w"):
                    await world.actuator.act(world.pool, action)
        await world.heal()
        assert await world.workers() == before
        async with asyncio.timeout(DEADLINE_S):
            assert (await world.actuator.act(world.pool, doable[0])).ok

    async def test_close_can_be_repeated(self, world: ActuatorWorld) -> None:
        await world.actuator.close()
        await world.actuator.close()
