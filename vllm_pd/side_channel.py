"""Free addresses for NIXL's side channel, reserved until the engine binds them.

vLLM reads VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, whose defaults (localhost, 5600) collide as soon as two workers share
a host, and a collision hangs the engine's start. We choose a free port in the API server process, some twenty seconds
before the engine binds it, and keep it ours meanwhile: a socket that is bound with SO_REUSEADDR but does not listen
keeps the kernel from giving the port to anyone else, while ZMQ, which also sets SO_REUSEADDR, can still bind and
listen on it (Linux refuses that only when some socket already listens).
"""

from __future__ import annotations

import ipaddress
import os
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_pd.errors import SettingsError

HOST_ENV = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_ENV = "VLLM_NIXL_SIDE_CHANNEL_PORT"
OWNER_ENV = "_VLLM_PD_SIDE_CHANNEL_OWNER"
"""Marks the two variables above as ours, so that our own child processes take them and nobody else's does."""

_FIRST_PORT, _LAST_PORT = 20000, 32000
"""Below the usual range of ephemeral ports, so that outgoing connections do not take a neighbour."""


@dataclass(frozen=True, slots=True)
class SideChannel:
    """Where other workers reach this one's side channel; data-parallel rank r listens on `port + r`."""

    host: str
    port: int


_held: list[socket.socket] = []
"""Reserving sockets, kept open for the life of the process."""


def bindable(host: str) -> bool:
    """Whether `host` is an IP address of this machine."""
    try:
        with _bind(host, 0):
            return True
    except (OSError, ValueError):
        return False


def choose_host(candidates: Iterable[str]) -> str:
    """The first candidate that this machine can bind, else loopback. Names, wildcards and empty texts are skipped."""
    for host in candidates:
        try:
            if not ipaddress.ip_address(host).is_unspecified and bindable(host):
                return host
        except ValueError:
            if host == "localhost":
                return "127.0.0.1"
    return "127.0.0.1"


def reserve(host: str, *, first_rank: int = 0, ranks: int = 1, tries: int = 200) -> SideChannel:
    """Reserve `ranks` consecutive free ports on `host` until this process ends.

    Returns:
        The base to put into the environment: rank r of `first_rank` to `first_rank + ranks - 1` gets `port + r`.

    Raises:
        SettingsError: no run of free ports was found.
    """
    for _ in range(tries):
        start = random.randint(_FIRST_PORT, _LAST_PORT - ranks)
        taken: list[socket.socket] = []
        try:
            for port in range(start, start + ranks):
                # Without SO_REUSEADDR first: two reservations must not share a port.
                with _bind(host, port, reuse=False):
                    pass
                taken.append(_bind(host, port))
        except OSError:
            for sock in taken:
                sock.close()
            continue
        _held.extend(taken)
        return SideChannel(host, start - first_rank)
    raise SettingsError(
        f"No {ranks} consecutive free ports were found on {host} for NIXL's side channel; "
        f"free some or set {HOST_ENV} and {PORT_ENV}."
    )


def ensure(candidates: Iterable[str], *, first_rank: int = 0, ranks: int = 1) -> SideChannel:
    """The side channel of this server: as set by the user, inherited from our parent process, or newly reserved.

    Sets the two environment variables that vLLM reads, for this process and its children.

    Raises:
        SettingsError: the user's port is no port, or no port is free.
    """
    if PORT_ENV in os.environ and os.environ.get(OWNER_ENV, "") in ("", str(os.getppid()), str(os.getpid())):
        return SideChannel(os.environ.get(HOST_ENV, "localhost"), _port(os.environ[PORT_ENV]))
    host = os.environ[HOST_ENV] if HOST_ENV in os.environ and OWNER_ENV not in os.environ else choose_host(candidates)
    channel = reserve(host, first_rank=first_rank, ranks=ranks)
    os.environ[HOST_ENV] = channel.host
    os.environ[PORT_ENV] = str(channel.port)
    os.environ[OWNER_ENV] = str(os.getpid())
    return channel


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
        raise SettingsError(f"{PORT_ENV} must be a port from 1 to 65535, got {text!r}; correct it, or unset it.")
    return int(text)


def _bind(host: str, port: int, *, reuse: bool = True) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
