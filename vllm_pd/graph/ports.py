"""Free TCP ports on this machine."""

from __future__ import annotations

import contextlib
import socket

LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT_S = 1.0


def free_port(host: str = LOOPBACK) -> int:
    """A port that was free a moment ago. Nothing reserves it: bind it soon."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """`count` different ports that were free a moment ago."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [int(each.getsockname()[1]) for each in sockets]


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
