"""Ports for NIXL's side channel: free, reserved until the engine binds them, and inherited by our children."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from vllm_pd import side_channel

zmq = pytest.importorskip("zmq")


def test_a_reserved_port_is_refused_to_others_and_open_to_the_engine() -> None:
    channel = side_channel.reserve("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((channel.host, channel.port))
    context = zmq.Context()
    engine = context.socket(zmq.ROUTER)
    client = context.socket(zmq.DEALER)
    try:
        engine.bind(f"tcp://{channel.host}:{channel.port}")
        client.connect(f"tcp://{channel.host}:{channel.port}")
        client.send(b"hello")
        assert engine.poll(5000)
        assert engine.recv_multipart()[-1] == b"hello"
    finally:
        context.destroy(linger=0)


def test_ranks_get_consecutive_ports_from_their_first_rank() -> None:
    channel = side_channel.reserve("127.0.0.1", first_rank=4, ranks=3)
    for rank in (4, 5, 6):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((channel.host, channel.port + rank))


def test_two_reservations_never_share_a_port() -> None:
    ports = {side_channel.reserve("127.0.0.1").port for _ in range(50)}
    assert len(ports) == 50


def test_an_address_set_by_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(side_channel.HOST_ENV, "10.1.2.3")
    monkeypatch.setenv(side_channel.PORT_ENV, "7000")
    assert side_channel.ensure(()) == side_channel.SideChannel("10.1.2.3", 7000)


@pytest.mark.parametrize("port", ["", "nixl", "0", "70000", "-1"])
def test_a_port_of_the_user_that_is_none_is_refused(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(side_channel.PORT_ENV, port)
    with pytest.raises(side_channel.SettingsError, match=side_channel.PORT_ENV):
        side_channel.ensure(())


def test_a_child_process_takes_its_parents_side_channel_and_a_grandchild_server_its_own() -> None:
    ours = side_channel.ensure(("127.0.0.1",))
    program = "from vllm_pd import side_channel as c; print(c.ensure(('127.0.0.1',)).port)"
    child = [sys.executable, "-c", program]
    assert int(subprocess.check_output(child, timeout=60)) == ours.port
    grandchild = ["sh", "-c", f'"{sys.executable}" -c "{program}"; true']
    assert int(subprocess.check_output(grandchild, timeout=60)) != ours.port


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        (("127.0.0.1",), "127.0.0.1"),
        (("0.0.0.0", "", "127.0.0.1"), "127.0.0.1"),
        (("203.0.113.7", "127.0.0.1"), "127.0.0.1"),
        (("localhost", "203.0.113.7"), "127.0.0.1"),
        (("some.host.example",), "127.0.0.1"),
        ((), "127.0.0.1"),
    ],
)
def test_the_first_bindable_address_is_chosen(candidates: tuple[str, ...], chosen: str) -> None:
    assert side_channel.choose_host(candidates) == chosen


def test_running_out_of_ports_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError("in use")

    monkeypatch.setattr(side_channel, "_bind", refuse)
    with pytest.raises(side_channel.SettingsError, match=side_channel.PORT_ENV):
        side_channel.reserve("127.0.0.1", tries=3)


def test_the_environment_is_what_vllm_reads() -> None:
    channel = side_channel.ensure(("127.0.0.1",))
    assert os.environ[side_channel.HOST_ENV] == channel.host
    assert os.environ[side_channel.PORT_ENV] == str(channel.port)
