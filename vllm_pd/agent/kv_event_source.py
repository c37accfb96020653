"""Subscribes to one engine's KV events and hands them on complete and in order, or says that it cannot.

vLLM publishes numbered messages on a PUB socket and keeps the last ones (10 000 by default) for whoever asks for them
again at a ROUTER socket. What that leaves open is closed here:

- A subscription starts late: everything is asked for once at the start.
- Messages are lost (a full queue, a slow joiner, a broken connection): a jump in the numbers makes us ask again. What
  arrives meanwhile waits in ZMQ's own queue, which is bounded; what it drops is the next jump.
- The last messages before a silence are lost, which no later number shows: after a while of silence we ask, too.
- The publisher starts over: numbers go backwards, or go on as if nothing had happened. Every request asks for the last
  message that we have as well, and it must come back with the same beginning (its time stamp); otherwise the engine is
  another one and nothing of before is true.
- What is missing cannot be had any more: nothing of before is known to be true either.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import zmq

from vllm_pd.agent.zmq_reader import ZmqReader

logger = logging.getLogger("vllm.vllm_pd")

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

_END = (-1).to_bytes(8, "big", signed=True)
_MARK_BYTES = 16
_YIELD_EVERY = 32


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Where one engine publishes, as something to connect to.

    Attributes:
        live: its PUB socket.
        replay: its ROUTER socket; empty when it has none, and nothing that was missed can be had again.
        topic: what its messages are published under.
    """

    live: str
    replay: str = ""
    topic: str = ""


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """Times in seconds.

    Attributes:
        queue_messages: most messages that wait for us, in each direction.
        known_messages: of how many messages we know the beginning, to tell a repeated one from another engine's.
        replay_s: how long a replay may be silent.
        replay_attempts: unanswered replays after which what is missing is given up.
        quiet_s: after how much silence we first ask whether something is missing; doubled each time, up to the second.
    """

    queue_messages: int = 20_000
    known_messages: int = 16_384
    replay_s: float = 5.0
    replay_attempts: int = 3
    quiet_s: tuple[float, float] = (1.0, 30.0)


@dataclass(slots=True)
class SourceStats:
    """What a source has seen since it started."""

    messages: int = 0
    """Handed on."""
    repeated: int = 0
    gaps: int = 0
    replays: int = 0
    lost: int = 0
    """How often nothing of before was known to be true any more."""


class EventSink(Protocol):
    """What a source feeds. Called in the source's loop; must not wait, must not raise."""

    def message(self, payload: bytes) -> None:
        """The next message of the engine."""

    def lost(self) -> None:
        """Messages are missing, or the engine started over: whatever was learned so far may be wrong."""


class _StartedOver(Exception):
    """The publisher is not the one whose messages we have."""


class KvEventSource:
    """One engine's events. `run` it once, in the loop that the sink belongs to."""

    def __init__(self, endpoints: EventEndpoints, sink: EventSink, limits: SourceLimits | None = None) -> None:
        self._endpoints = endpoints
        self._sink = sink
        self._limits = limits or SourceLimits()
        self.stats = SourceStats()
        self._next: int | None = 0 if endpoints.replay else None
        """Number of the message that comes next; None when any may."""
        self._marks: deque[bytes] = deque(maxlen=self._limits.known_messages)
        """Beginnings of the messages before that one, the newest last."""

    async def run(self) -> None:
        """Subscribe and hand on until cancelled."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            socket = context.socket(zmq.SUB)
            _prepare(socket, self._endpoints.live, self._limits.queue_messages)
            socket.subscribe(self._endpoints.topic)
            broken = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            with ZmqReader(socket) as live, ZmqReader(broken) as disconnects:
                socket.connect(self._endpoints.live)
                await self._catch_up(context)
                await self._follow(context, live, disconnects)
        finally:
            context.destroy(linger=0)

    async def _follow(self, context: Context, live: ZmqReader, disconnects: ZmqReader) -> None:
        first, longest = self._limits.quiet_s
        quiet, received = first, 0
        while True:
            message = await live.receive(quiet)
            if disconnects.take() is not None:
                while disconnects.take() is not None:
                    pass
                await self._catch_up(context)
            elif message is None:
                await self._catch_up(context)
                quiet = min(2 * quiet, longest)
            if message is None:
                continue
            quiet, received = first, received + 1
            if received % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
            if len(message) == 3:
                await self._take(context, int.from_bytes(message[1], "big"), message[2])

    async def _take(self, context: Context, number: int, payload: bytes) -> None:
        """A live message."""
        if self._next is not None and number < self._next:
            if self._known(number, payload):
                self.stats.repeated += 1
                return
            logger.info("vllm-pd: the engine's KV events started over")
            self._lose(0 if self._endpoints.replay else number)
            await self._catch_up(context)
        if self._next is not None and number > self._next:
            self.stats.gaps += 1
            for _ in range(self._limits.replay_attempts):
                if await self._catch_up(context):
                    break
        if self._next is None or number == self._next:
            self._hand_on(number, payload)
        elif number > self._next:
            logger.warning("vllm-pd: KV events before number %d are lost; the index starts anew from there", number)
            self._lose(number)
            self._hand_on(number, payload)
        else:
            # It was among what was replayed.
            self.stats.repeated += 1

    async def _catch_up(self, context: Context) -> bool:
        """Ask for everything that comes after what we have, and make sure that what we have is of this engine.

        Returns:
            Whether it is complete up to now.
        """
        while self._endpoints.replay:
            had = self._next
            try:
                if await self._replay(context):
                    return True
            except _StartedOver:
                logger.info("vllm-pd: the engine's KV events started over")
                self._lose(0)
                continue
            if self._next == had:
                return False
        return False

    async def _replay(self, context: Context) -> bool:
        """One request. Returns whether it was answered to its end."""
        self.stats.replays += 1
        socket = context.socket(zmq.DEALER)
        # Unlimited on this side: what is dropped on the way must be asked for again.
        _prepare(socket, self._endpoints.replay, 0)
        with ZmqReader(socket) as reader:
            socket.connect(self._endpoints.replay)
            # From the last one that we have.
            start = max(0, (self._next or 0) - 1)
            await_proof = bool(self._marks)
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            received = 0
            while (message := await reader.receive(self._limits.replay_s)) is not None:
                received += 1
                if received % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)
                if len(message) != 4:
                    continue
                if message[2] == _END:
                    if await_proof:
                        raise _StartedOver
                    return True
                number, payload = int.from_bytes(message[2], "big"), message[3]
                if await_proof:
                    await_proof = False
                    if number == start and payload[:_MARK_BYTES] != self._marks[-1]:
                        raise _StartedOver
                    if number > start:
                        logger.warning("vllm-pd: the engine no longer has its KV events before number %d", number)
                        self._lose(number)
                if self._next is None or not self._marks:
                    self._next = max(number, self._next or 0)
                if number > self._next:
                    # Dropped on the way.
                    return False
                if number == self._next:
                    self._hand_on(number, payload)
        return False

    def _hand_on(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._marks.append(payload[:_MARK_BYTES])
        self.stats.messages += 1
        self._sink.message(payload)

    def _lose(self, following: int) -> None:
        self._next = following
        self._marks.clear()
        self.stats.lost += 1
        self._sink.lost()

    def _known(self, number: int, payload: bytes) -> bool:
        """Whether this is a message that was handed on."""
        assert self._next is not None
        index = number - (self._next - len(self._marks))
        return index >= 0 and self._marks[index] == payload[:_MARK_BYTES]


def _prepare(socket: zmq.Socket[bytes], endpoint: str, queue_messages: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, queue_messages)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    if endpoint.startswith("tcp://"):
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
