"""An actuator that runs a program of the operator's: for every place where workers can be started and that has no
actuator of its own.

    PROGRAM add ROLE COUNT          start so many more workers of this role
    PROGRAM remove WORKER           drain this worker (host:port) and end it
    PROGRAM give-up ROLE COUNT      so many that were asked for did not come up: stop waiting for them
    PROGRAM starting                print JSON: [{"role": "decode", "count": 2, "for_s": 12.5}]

What is asked for is on stdin too, as one JSON object with `pool`, `epoch` and `why`. The number of the planner's
leadership of the pool is there as `term`, and in the variable VLLM_PD_PLANNER_TERM: it only grows, so a program that
keeps the largest one it has seen of each pool can refuse what a planner that was replaced meanwhile still asks for.

The program returns at once, it does not wait for a worker. Exit status 0: it is begun. 3: it is refused, nothing was
changed, and the last line of stderr says why; of `starting` it says that the program does not know. Everything else:
what came of it is unknown. What it leaves running in the background goes on; its output should go elsewhere
(`>/dev/null 2>&1`), since the planner's pipes end with the planner.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vllm_pd.errors import ActuatorError, SettingsError
from vllm_pd.planner.actuator import Outcome
from vllm_pd.planner.actuators.context import ActuatorContext
from vllm_pd.planner.actuators.known_start import another_start
from vllm_pd.planner.actuators.programs import Programs
from vllm_pd.planner.actuators.wire import as_json, read_starts
from vllm_pd.planner.mandate import ANYBODY, Mandate
from vllm_pd.planner.model import Action, AddAction, GiveUp, MoveAction, RemoveAction, StartView
from vllm_pd.state.base import PoolId, Registry, Role

REFUSED = 3
TERM_VARIABLE = "VLLM_PD_PLANNER_TERM"
_MOST_SAID = 300


class CommandActuator:
    """Adds and removes workers by running a program.

    Args:
        command: the program and its first arguments, as a shell would split them; no shell runs it.
        registry: where the workers of the pool are found. Stays open.
        deadline_s: of one run, seconds; then its process group is killed.
        mandate: in whose name it acts.

    Raises:
        SettingsError: there is no command.
    """

    name = "command"

    def __init__(
        self, command: str, registry: Registry, *, deadline_s: float = 30.0, mandate: Mandate = ANYBODY
    ) -> None:
        try:
            self._command = shlex.split(command)
        except ValueError as e:
            raise SettingsError(f"The actuator's command {command!r} cannot be split into words: {e}.") from None
        if not self._command:
            raise SettingsError("The actuator command names no program; write command=/path/to/program.")
        self._registry = registry
        self._deadline_s = deadline_s
        self._mandate = mandate
        self._programs = Programs()

    def can(self, action: Action) -> bool:
        return isinstance(action, AddAction | RemoveAction)

    async def act(self, pool: PoolId, action: Action) -> Outcome:
        match action:
            case AddAction():
                return await self._do(pool, ["add", action.role, str(action.count)], as_json(action))
            case RemoveAction():
                refused = await another_start(self._registry, pool, action)
                return refused or await self._do(pool, ["remove", action.worker], as_json(action))
            case MoveAction():
                return Outcome(False, "A command adds and removes workers; roles are moved by the actuator roles.")

    async def starting(self, pool: PoolId) -> Sequence[StartView]:
        status, out, said = await self._run(["starting"], {"action": "starting", "pool": pool})
        if status == REFUSED:
            return ()
        if status:
            raise ActuatorError(f"{self._what} starting ended with status {status}: {said}.")
        try:
            return read_starts(out)
        except ValueError as e:
            raise ActuatorError(f"{self._what} starting printed something else than it should: {e}.") from None

    async def give_up(self, pool: PoolId, role: Role, count: int) -> Outcome:
        asked = as_json(GiveUp(role, count, "They did not come up in time."))
        return await self._do(pool, ["give-up", role, str(count)], asked)

    async def close(self) -> None:
        self._programs.close()

    @property
    def _what(self) -> str:
        return f"The actuator's command {self._command[0]}"

    async def _do(self, pool: PoolId, words: Sequence[str], asked: Mapping[str, Any]) -> Outcome:
        term = await self._mandate.confirm(pool)
        status, _, said = await self._run(words, {**asked, "pool": pool, "term": term}, {TERM_VARIABLE: str(term)})
        if status == REFUSED:
            return Outcome(False, f"{self._what} refused to {words[0]}: {said}.")
        if status:
            raise ActuatorError(f"{self._what} {words[0]} ended with status {status}: {said}.")
        return Outcome(True, said if said != _SILENT else "")

    async def _run(
        self, words: Sequence[str], asked: Mapping[str, Any], env: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, str]:
        """Exit status, stdout and the last line of stderr. Raises ActuatorError when it cannot be run or ended."""
        try:
            command, given = [*self._command, *words], msgspec.json.encode(asked)
            ended = await self._programs.run(command, given, self._deadline_s, env=env)
        except TimeoutError:
            raise ActuatorError(f"{self._what} {words[0]} did not return within {self._deadline_s:g} s.") from None
        except OSError as e:
            raise ActuatorError(f"{self._what} cannot be run: {e.strerror or e}.") from None
        return ended.status, ended.out, _last_line(ended.err)


_SILENT = "it said nothing"


def _last_line(err: bytes) -> str:
    lines = [line.strip() for line in err.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].rstrip(".")[-_MOST_SAID:] if lines else _SILENT


def open_actuator(argument: str, context: ActuatorContext) -> CommandActuator:
    """`argument` is the command. Raises SettingsError as `CommandActuator`."""
    return CommandActuator(argument, context.registry, deadline_s=context.deadline_s, mandate=context.mandate)
