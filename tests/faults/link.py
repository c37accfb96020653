"""A TCP link that can be cut, slowed, stalled or taken down: what a bad network does between two processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

from vllm_pd.background import end_tasks
from vllm_pd.graph.ports import LOOPBACK

_DEADLINE_S = 30.0
_PIECE = 1 << 16
_SLOW_PIECE = 1 << 12
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(slots=True, eq=False)
class _Connection:
    """Both ends of one connection that passes the link."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter

    def reset(self) -> None:
        for end in (self.near, self.far):
            sock = end.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            end.transport.abort()


class Link:
    """Passes what comes to `port` on to `backend_port`, both on loopback, in a thread of its own.

    Methods may be called from any thread and return when they have taken effect.
    """

    def __init__(self, backend_port: int) -> None:
        self.backend_port = backend_port
        self.port = 0
        self._open: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._latency_s = 0.0
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._passes = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)

    @property
    def url(self) -> str:
        """Base URL of an HTTP server behind it."""
        return f"http://{LOOPBACK}:{self.port}"

    def start(self) -> Link:
        self._thread.start()
        self._call(self._passes.set)
        self.up()
        return self

    def stop(self) -> None:
        """Cut everything. Idempotent."""
        if self._loop.is_closed():
            return
        self.down()

        async def end() -> None:
            await end_tasks(self._tasks)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(_DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_DEADLINE_S)
        self._loop.close()

    def up(self) -> None:
        """Accept connections."""

        async def listen() -> None:
            if self._server is None:
                server = await asyncio.start_server(self._serve, LOOPBACK, self.port, backlog=512)
                self._server, self.port = server, server.sockets[0].getsockname()[1]

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result(_DEADLINE_S)

    def down(self) -> None:
        """As if nobody listened: connections are refused, those that stand are reset."""

        def close() -> None:
            if self._server is not None:
                self._server.close()
                self._server = None
            self._reset()

        self._call(close)

    def reset(self) -> None:
        """Every connection that stands is reset; new ones pass."""
        self._call(self._reset)

    def close_all(self) -> None:
        """Every connection that stands is closed in order; new ones pass."""

        def close() -> None:
            for each in self._open:
                each.near.close()
                each.far.close()

        self._call(close)

    def stall(self) -> None:
        """Connections stand and are made, and nothing passes any more."""
        self._call(self._passes.clear)

    def slow(self, latency_s: float) -> None:
        """Each piece of at most 4 KiB takes so long; 0: as fast as it goes."""
        self._call(lambda: setattr(self, "_latency_s", latency_s))

    def heal(self) -> None:
        """Undo `stall`, `slow` and `down`."""
        self._call(self._passes.set)
        self.slow(0.0)
        self.up()

    def __enter__(self) -> Link:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _call(self, what: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                what()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(_DEADLINE_S), "the link's thread does not answer"

    def _reset(self) -> None:
        for connection in list(self._open):
            connection.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection: _Connection | None = None
        try:
            far_reader, far = await asyncio.open_connection(LOOPBACK, self.backend_port)
            connection = _Connection(writer, far)
            self._open.add(connection)
            pumps = [
                asyncio.ensure_future(self._pump(reader, far)),
                asyncio.ensure_future(self._pump(far_reader, writer)),
            ]
            try:
                await asyncio.gather(*pumps)
            finally:
                await end_tasks(pumps)
        except OSError:
            # An end was reset, or nobody listens behind the link: the other end is reset, too.
            (connection or _Connection(writer, writer)).reset()
        except asyncio.CancelledError:
            # Only `stop` cancels; a handler that ends cancelled would be reported as an error.
            pass
        finally:
            self._tasks.discard(task)
            if connection is not None:
                self._open.discard(connection)
                connection.far.close()
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            data = await reader.read(_SLOW_PIECE if self._latency_s else _PIECE)
            await self._passes.wait()
            if self._latency_s:
                await asyncio.sleep(self._latency_s)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
