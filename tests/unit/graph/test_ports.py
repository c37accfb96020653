"""Ports that are free stay so until a server listens."""

from __future__ import annotations

import asyncio
import socket

import pytest

from vllm_pd.graph import ports
from vllm_pd.graph.ports import LOOPBACK, can_bind, free_port, free_ports, is_listening


def test_nobody_else_gets_a_port_before_its_server_listens() -> None:
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((LOOPBACK, port))
    assert can_bind(port)
    assert not is_listening(port)


async def test_a_server_listens_on_it_and_does_so_again_after_a_restart() -> None:
    port = free_port()
    for _ in range(2):
        server = await asyncio.start_server(lambda *_: None, LOOPBACK, port)
        _, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.close()
        server.close()
        await server.wait_closed()


def test_a_server_of_all_addresses_listens_on_it() -> None:
    with socket.create_server(("0.0.0.0", free_port())) as server:
        assert is_listening(server.getsockname()[1])


def test_ports_are_different_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_MOST_HELD", 4)
    assert len(set(free_ports(6))) == 6
    first = free_port()
    free_ports(4)
    assert len(ports._held) == 4
    with socket.socket() as other:
        other.bind((LOOPBACK, first))
