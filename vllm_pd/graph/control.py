"""The supervisor's control interface: one JSON object each way over a socket that only its owner can open.

Who is on the other side is asked of the kernel, not of the caller; there is no password and nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct

import msgspec

from vllm_pd.errors import GraphError
from vllm_pd.graph.runs import RunFolder
from vllm_pd.graph.status import GraphStatus

TIMEOUT_S = 30.0
"""A machine that loads several models is slow."""
_LONGEST = 4 << 20
_PEER = struct.Struct("3i")


class AskStatus(msgspec.Struct, frozen=True, tag="status", tag_field="do"):
    """How everything is."""


class Scale(msgspec.Struct, frozen=True, tag="scale", tag_field="do"):
    """So many instances of a component are wanted from now on."""

    component: str
    count: int


class InTheNameOf(msgspec.Struct, frozen=True):
    """The leadership in which a planner asks. What comes from an older one than the newest that was seen is refused."""

    pool: str
    term: int
    """Only grows."""


class Add(msgspec.Struct, frozen=True, tag="add", tag_field="do"):
    """So many more instances of a component are wanted from now on."""

    component: str
    count: int
    by: InTheNameOf | None = None
    """None: a person asks."""


class GiveUp(msgspec.Struct, frozen=True, tag="give_up", tag_field="do"):
    """At most so many instances of a component that have not come up are not wanted any more."""

    component: str
    count: int
    by: InTheNameOf | None = None


class Remove(msgspec.Struct, frozen=True, tag="remove", tag_field="do"):
    """End one instance, and want one less of its component. Named by its name, or as `HOST:PORT` of its URL."""

    instance: str
    by: InTheNameOf | None = None


class Restart(msgspec.Struct, frozen=True, tag="restart", tag_field="do"):
    """Start anew: an instance, or all of a component. One that was given up gets a new chance."""

    name: str


class Stop(msgspec.Struct, frozen=True, tag="stop", tag_field="do"):
    """End everything; `now`: without waiting for what is under way."""

    now: bool = False


Request = AskStatus | Scale | Add | GiveUp | Remove | Restart | Stop


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of a request."""

    ok: bool
    detail: str = ""
    is_setting: bool = False
    """Whether what was refused is a mistake in what was asked for, and not the state of things."""
    is_deposed: bool = False
    """Whether it was refused because a planner of a later leadership has asked already."""
    status: GraphStatus | None = None


_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_replies = msgspec.json.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """Raises GraphError."""
    try:
        return _requests.decode(line)
    except msgspec.MsgspecError as e:
        raise GraphError(f"The supervisor was asked something that it does not know ({e}).") from None


def decode_reply(line: bytes) -> Reply:
    """Raises GraphError."""
    try:
        return _replies.decode(line)
    except msgspec.MsgspecError as e:
        raise GraphError(f"The supervisor's answer cannot be read ({e}); is it of another version?") from None


def ask(folder: RunFolder, request: Request, *, timeout_s: float = TIMEOUT_S) -> Reply:
    """Ask and wait for the answer. Blocks.

    Raises:
        GraphError: there is no supervisor, or it did not answer in time.
    """
    try:
        with socket.socket(socket.AF_UNIX) as s, folder.socket_address() as address:
            s.settimeout(timeout_s)
            s.connect(address)
            s.sendall(encode(request))
            with s.makefile("rb") as lines:
                line = _answered(lines.readline(_LONGEST))
    except OSError as e:
        raise _unreachable(folder, e) from None
    return decode_reply(line)


async def ask_soon(folder: RunFolder, request: Request, *, timeout_s: float = TIMEOUT_S) -> Reply:
    """The same without blocking the event loop. Raises GraphError."""
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            with folder.socket_address() as address:
                reader, writer = await asyncio.open_unix_connection(address, limit=_LONGEST)
            writer.write(encode(request))
            await writer.drain()
            line = _answered(await reader.readline())
    except (OSError, ValueError, TimeoutError) as e:
        raise _unreachable(folder, e) from None
    finally:
        if writer is not None:
            writer.close()
    return decode_reply(line)


def status(folder: RunFolder, *, timeout_s: float = TIMEOUT_S) -> GraphStatus:
    """How everything is. Raises GraphError."""
    reply = ask(folder, AskStatus(), timeout_s=timeout_s)
    if reply.status is None:
        raise GraphError(f"The supervisor of {folder.graph} did not say how it is: {reply.detail}")
    return reply.status


def peer_is_owner(connection: socket.socket) -> bool:
    """Whether the process on the other side is of our user, or root."""
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid in (0, os.geteuid())


def _answered(line: bytes) -> bytes:
    """Raises OSError when the supervisor ended before it answered."""
    if not line:
        raise ConnectionResetError("it has just ended")
    return line


def _unreachable(folder: RunFolder, cause: BaseException) -> GraphError:
    if isinstance(cause, FileNotFoundError | ConnectionRefusedError):
        return GraphError(f"The graph {folder.graph} is not up.")
    return GraphError(f"The supervisor of {folder.graph} did not answer ({cause or type(cause).__name__}).")
