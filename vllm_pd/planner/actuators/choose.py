"""From the names in the settings to what carries out actions.

    roles                     moves workers between roles without a restart; always among them
    processes[=SOCKET]        starts and ends workers of a graph on this machine
    kubernetes[=NAMESPACE]    scales workloads, labels pods
    command=PROGRAM ARGS      runs a program of yours
    webhook=URL               asks an HTTP server of yours

The first in the list that knows how to do an action does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from vllm_pd.errors import SettingsError
from vllm_pd.layered import nearest
from vllm_pd.planner.actuator import Actuator, Outcome
from vllm_pd.planner.actuators.context import ActuatorContext
from vllm_pd.planner.actuators.role_labels import RoleLabels
from vllm_pd.planner.model import Action, StartView
from vllm_pd.state.base import PoolId, Role

ROLES = "roles"
_MODULES = {"processes": "processes", "kubernetes": "kubernetes", "command": "command", "webhook": "webhook"}
NAMES = (ROLES, *_MODULES)


def check_actuator(text: str) -> str:
    """Return `text` if it names an actuator. Raises ValueError with a phrase that completes "NAME ..."."""
    name, equals, argument = text.strip().partition("=")
    if name not in NAMES:
        raise ValueError(f"names the unknown actuator {name!r}{nearest(name, list(NAMES))}; known: {', '.join(NAMES)}")
    if name in ("command", "webhook") and not argument.strip():
        raise ValueError(f"must say which: {name}={'PROGRAM' if name == 'command' else 'URL'}")
    if name == ROLES and equals:
        raise ValueError("must be just 'roles', without a value")
    return text.strip()


def open_actuator(text: str, context: ActuatorContext) -> Actuator:
    """What `text` names. The module of each has a function `open_actuator(argument, context)`.

    Raises:
        SettingsError: it cannot be used as named, or an extra is not installed.
    """
    try:
        name, _, argument = check_actuator(text).partition("=")
    except ValueError as e:
        raise SettingsError(f"--actuator {e}.") from None
    if name == ROLES:
        return RoleLabels(context.registry, context.roles, timeout_s=context.move_timeout_s, mandate=context.mandate)
    module = import_module(f"vllm_pd.planner.actuators.{_MODULES[name]}")
    opened: Actuator = module.open_actuator(argument.strip(), context)
    return opened


class Actuators:
    """Several as one: the first that knows how to do an action does it.

    Args:
        members: in the order of preference.
    """

    name = "actuators"

    def __init__(self, members: Sequence[Actuator]) -> None:
        self.members = tuple(members)

    def can(self, action: Action) -> bool:
        return any(member.can(action) for member in self.members)

    async def act(self, pool: PoolId, action: Action) -> Outcome:
        for member in self.members:
            if member.can(action):
                return await member.act(pool, action)
        return Outcome(False, f"None of the actuators ({self._names}) can do this; name another with --actuator.")

    async def starting(self, pool: PoolId) -> Sequence[StartView]:
        return [start for member in self.members for start in await member.starting(pool)]

    async def give_up(self, pool: PoolId, role: Role, count: int) -> Outcome:
        """Asked of all that have so many workers of this role on their way, in order, until `count` are given up."""
        outcomes: list[Outcome] = []
        for member in self.members:
            there = sum(start.count for start in await member.starting(pool) if start.role is role)
            if there and count > 0:
                outcomes.append(await member.give_up(pool, role, min(there, count)))
                count -= min(there, count)
        if not outcomes:
            return Outcome(True, "Nothing of the kind is on its way any more.")
        return Outcome(all(each.ok for each in outcomes), " ".join(each.detail for each in outcomes if each.detail))

    async def close(self) -> None:
        for member in self.members:
            await member.close()

    @property
    def _names(self) -> str:
        return ", ".join(member.name for member in self.members)
