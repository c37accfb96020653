"""Receives from a ZMQ socket in an asyncio loop, without a task or a future for each message."""

from __future__ import annotations

import asyncio
from types import TracebackType

import zmq


class ZmqReader:
    """Owns one socket of the running loop: set it up before, close it with this. One caller at a time."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._signalled = asyncio.Event()
        self._loop.add_reader(self._fd, self._signalled.set)

    def take(self) -> list[bytes] | None:
        """The next message that is already here, or None."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    async def receive(self, timeout_s: float) -> list[bytes] | None:
        """The next message, or None when none came in time."""
        deadline = self._loop.time() + timeout_s
        while True:
            # The descriptor signals a change once, so look before waiting, and clear before looking.
            self._signalled.clear()
            if (message := self.take()) is not None:
                return message
            left = deadline - self._loop.time()
            if left <= 0:
                return None
            try:
                async with asyncio.timeout(left):
                    await self._signalled.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        """Close the socket; what it has not sent is dropped. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)

    def __enter__(self) -> ZmqReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
