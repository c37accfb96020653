"""The bad network of the fault tests does what its name says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.faults.link import Link
from vllm_pd.graph.ports import LOOPBACK, free_port

DEADLINE_S = 20.0
SHORT_S = 0.3


@pytest.fixture
def echo() -> Iterator[int]:
    """Port of a server that sends back what it gets."""
    listener = socket.create_server((LOOPBACK, 0))
    held = []

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture
def link(echo: int) -> Iterator[Link]:
    with Link(echo) as made:
        yield made


def connect(link: Link, deadline_s: float = DEADLINE_S) -> socket.socket:
    return socket.create_connection((LOOPBACK, link.port), timeout=deadline_s)


def echoes(connection: socket.socket, data: bytes = b"hello") -> bool:
    connection.sendall(data)
    got = b""
    while len(got) < len(data) and (piece := connection.recv(65536)):
        got += piece
    return got == data


def test_it_passes_bytes_and_ends(link: Link) -> None:
    with connect(link) as connection:
        assert echoes(connection, b"x" * 300_000)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


def test_a_reset_reaches_those_that_stand_and_nobody_else(link: Link) -> None:
    with connect(link) as old:
        assert echoes(old)
        link.reset()
        with pytest.raises(ConnectionResetError):
            old.recv(1)
    with connect(link) as new:
        assert echoes(new)


def test_an_orderly_close_is_no_reset(link: Link) -> None:
    with connect(link) as old:
        assert echoes(old)
        link.close_all()
        assert old.recv(1) == b""


def test_nothing_passes_a_stalled_link_and_nothing_is_lost(link: Link) -> None:
    with connect(link) as connection:
        assert echoes(connection)
        link.stall()
        connection.sendall(b"later")
        connection.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        link.heal()
        connection.settimeout(DEADLINE_S)
        assert connection.recv(5) == b"later"


def test_a_link_that_is_down_refuses_and_comes_back_on_its_port(link: Link) -> None:
    link.down()
    with pytest.raises(ConnectionRefusedError):
        connect(link)
    link.heal()
    with connect(link) as connection:
        assert echoes(connection)


def test_a_slow_link_passes_everything(link: Link) -> None:
    with connect(link) as connection:
        link.slow(0.01)
        assert echoes(connection, b"x" * 20_000)


def test_behind_which_nobody_listens_connections_are_reset() -> None:
    # The reset may come before the connection is seen to be there.
    with Link(free_port()) as link, pytest.raises(ConnectionResetError), connect(link) as connection:
        connection.recv(1)
