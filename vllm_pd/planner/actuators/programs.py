"""Running a program to its end, with something on its stdin, within a deadline. POSIX only.

A program that has ended is not waited for any longer because of what it started in the background: that often inherits
its output. It is read, and dropped, as long as it comes, so that nobody is stopped by a pipe that is full or closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

_MOST_OUTPUT = 1 << 20
_LAST_WORDS_S = 0.5
"""For what a program that has ended wrote last: it is in the pipe already."""
_KILL_S = 5.0
_STDIN, _STDOUT, _STDERR = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended. `out` is the beginning of its output, `err` the end of its complaints."""

    status: int
    out: bytes
    err: bytes


class _Program(asyncio.SubprocessProtocol):
    def __init__(self) -> None:
        self.out, self.err = bytearray(), bytearray()
        self.ended = asyncio.Event()
        self.silent = asyncio.Event()
        """Nobody has its output any more."""
        self._open = {_STDOUT, _STDERR}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == _STDOUT:
            self.out += data[: _MOST_OUTPUT - len(self.out)]
        else:
            self.err += data
            del self.err[:-_MOST_OUTPUT]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.silent.set()

    def process_exited(self) -> None:
        self.ended.set()


class Programs:
    """Runs programs, any number at a time. Belongs to one event loop."""

    def __init__(self) -> None:
        self._heard: dict[asyncio.SubprocessTransport, _Program] = {}
        """Those that have ended and whose output somebody still has."""

    async def run(
        self, command: Sequence[str], given: bytes, deadline_s: float, *, env: Mapping[str, str] | None = None
    ) -> Ended:
        """Run it to its end.

        Args:
            env: variables that it gets beside those of this process.

        Raises:
            OSError: it cannot be run.
            TimeoutError: it did not end within `deadline_s`; its process group was killed.
        """
        for transport, known in list(self._heard.items()):
            if known.silent.is_set():
                del self._heard[transport]
                transport.close()
        # A group of its own, so that what it starts and waits for ends with it at the deadline.
        transport, program = await asyncio.get_running_loop().subprocess_exec(
            _Program, *command, start_new_session=True, env={**os.environ, **(env or {})}
        )
        self._heard[transport] = program
        try:
            # uvloop's is one in all but its class.
            stdin = cast(asyncio.WriteTransport, transport.get_pipe_transport(_STDIN))
            # A program that does not read it has ended, or closed it: the transport drops it then, or (uvloop's, closed
            # already) says so by this error.
            with contextlib.suppress(RuntimeError):
                stdin.write(given)
                stdin.close()
            async with asyncio.timeout(deadline_s):
                await program.ended.wait()
        finally:
            if transport.get_returncode() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(transport.get_pid(), signal.SIGKILL)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_KILL_S):
                        await program.ended.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await program.silent.wait()
        status = transport.get_returncode()
        assert status is not None
        return Ended(status, bytes(program.out), bytes(program.err))

    def close(self) -> None:
        """Hear nobody any more. Idempotent."""
        heard, self._heard = self._heard, {}
        for transport in heard:
            transport.close()
