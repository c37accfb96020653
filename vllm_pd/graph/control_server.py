"""The supervisor's side of its control interface; see `control`."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType

from vllm_pd.errors import DeposedError, PDError
from vllm_pd.graph import control
from vllm_pd.graph.control import AskStatus, InTheNameOf, Reply, Request
from vllm_pd.graph.runs import RunFolder
from vllm_pd.graph.supervisor import Supervisor

_LONGEST_LINE = 1 << 16

_log = logging.getLogger(__name__)


class ControlServer:
    """Answers while its `async with` block runs.

    Args:
        stop: set when somebody asks for the end; the supervisor's `hurry` too, when it is to be quick.
    """

    def __init__(self, folder: RunFolder, supervisor: Supervisor, stop: asyncio.Event) -> None:
        self._path = folder.path / "control.sock"
        self._folder = folder
        self._supervisor = supervisor
        self._stop = stop
        self._server: asyncio.Server | None = None
        self._terms: dict[str, int] = {}
        """By pool, of the newest planner that has asked for something."""

    async def __aenter__(self) -> ControlServer:
        self._path.unlink(missing_ok=True)
        with self._folder.socket_address() as address:
            self._server = await asyncio.start_unix_server(self._talk, address, limit=_LONGEST_LINE)
        self._path.chmod(0o600)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not control.peer_is_owner(writer.get_extra_info("socket")):
                return
            async with asyncio.timeout(control.TIMEOUT_S):
                line = await reader.readline()
                if line:
                    writer.write(control.encode(self._answer(line)))
                    await writer.drain()
        except (OSError, ValueError, TimeoutError) as e:
            _log.warning("somebody asked and did not wait for the answer: %r", e)
        finally:
            writer.close()

    def _answer(self, line: bytes) -> Reply:
        try:
            return self._do(control.decode_request(line))
        except PDError as e:
            return Reply(
                ok=False,
                detail=str(e),
                is_setting=isinstance(e, ValueError),
                is_deposed=isinstance(e, DeposedError),
            )

    def _do(self, request: Request) -> Reply:
        supervisor = self._supervisor
        match request:
            case AskStatus():
                return Reply(ok=True, status=supervisor.status())
            case control.Scale(component, count):
                return Reply(ok=True, detail=supervisor.scale(component, count))
            case control.Add(component, count, by):
                self._admit(by)
                return Reply(ok=True, detail=supervisor.add(component, count))
            case control.GiveUp(component, count, by):
                self._admit(by)
                return Reply(ok=True, detail=supervisor.give_up(component, count))
            case control.Remove(instance, by):
                self._admit(by)
                return Reply(ok=True, detail=supervisor.remove(instance))
            case control.Restart(name):
                return Reply(ok=True, detail=supervisor.restart(name))
            case control.Stop(now):
                if now:
                    supervisor.hurry.set()
                self._stop.set()
                return Reply(ok=True, detail="Everything is being ended.")

    def _admit(self, by: InTheNameOf | None) -> None:
        """Raises DeposedError for a planner of an older leadership than the newest that was here."""
        if by is None:
            return
        newest = self._terms.get(by.pool, 0)
        if by.term < newest:
            raise DeposedError(f"A planner of a later leadership of pool {by.pool} has asked already.")
        self._terms[by.pool] = by.term
