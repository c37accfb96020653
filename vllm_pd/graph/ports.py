"""Free TCP ports on this machine."""

from __future__ import annotations

import socket
from collections import deque

LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT_S = 1.0
_MOST_HELD = 128
_held: deque[socket.socket] = deque()
"""Oldest first: bound, not listening. Whoever asks the kernel for any free port, or connects from one, gets another,
and a server that sets SO_REUSEADDR, as servers do, can listen all the same. A server that binds its port only after
seconds of imports otherwise finds, now and then, that somebody else listens there."""


def free_port(host: str = LOOPBACK) -> int:
    """A free port, as `free_ports`."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """`count` different ports that are free, and kept so for servers that set SO_REUSEADDR.

    They are kept until this process ends or has asked for many more.
    """
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    _held.extend(sockets)
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind((host, 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    while len(_held) > max(_MOST_HELD, count):
        _held.popleft().close()
    return ports


def is_listening(port: int, host: str = LOOPBACK) -> bool:
    """Whether something accepts connections on `port`."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def can_bind(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen on `port` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections of an earlier server that linger do not keep a new one from listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
