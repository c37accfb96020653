"""TCP keep-alive: a peer whose host vanished (power, network, a forgotten NAT entry) is noticed by the kernel.

A stopped process is not: its host's kernel goes on answering. That is what `router.health` is for.
"""

from __future__ import annotations

import socket

IDLE_S = 5
"""Of silence, until the first question."""
INTERVAL_S = 2
QUESTIONS = 3
"""Without an answer to so many the connection is dead: after 11 s in all."""


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel end the connection when its peer is gone. A system that lacks an option keeps its own times."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE_S),
        ("TCP_KEEPINTVL", INTERVAL_S),
        ("TCP_KEEPCNT", QUESTIONS),
        # For data that is under way: without it, it is sent again for a quarter of an hour.
        ("TCP_USER_TIMEOUT", 1000 * (IDLE_S + INTERVAL_S * QUESTIONS)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
