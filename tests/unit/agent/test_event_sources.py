"""Where an engine that publishes can be reached."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from vllm_pd.agent import event_sources
from vllm_pd.agent.event_sources import event_endpoints
from vllm_pd.agent.kv_event_source import EventEndpoints


def config(endpoint: str, replay: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(endpoint=endpoint, replay_endpoint=replay, topic="t")


@pytest.mark.parametrize(
    ("bound", "reached"),
    [
        ("ipc:///tmp/x/inproc-live_dp1", "ipc:///tmp/x/inproc-live_dp1"),
        ("tcp://*:5557", "tcp://127.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[::]:5557", "tcp://[::1]:5557"),
        ("tcp://10.0.0.7:33000", "tcp://10.0.0.7:33000"),
        ("tcp://[fd00::7]:33000", "tcp://[fd00::7]:33000"),
    ],
)
def test_an_engine_of_this_host(bound: str, reached: str) -> None:
    assert event_endpoints({0: config(bound, bound)}, range(1)) == {0: EventEndpoints(reached, reached, "t")}


def test_an_engine_without_replay() -> None:
    assert event_endpoints({0: config("tcp://*:1")}, range(1)) == {0: EventEndpoints("tcp://127.0.0.1:1", "", "t")}


@pytest.mark.parametrize("bound", ["ipc:///tmp/x", "tcp://*:5557", "tcp://[::]:5557", "inproc://events", "udp://h:1"])
def test_an_engine_elsewhere_that_did_not_say_where_is_named_once(bound: str, caplog: pytest.LogCaptureFixture) -> None:
    event_sources._complain.cache_clear()
    with caplog.at_level(logging.WARNING, "vllm.vllm_pd"):
        for _ in range(2):
            found = event_endpoints({0: config("tcp://10.0.0.7:1"), 3: config(bound)}, range(1))
    assert set(found) == {0}
    assert caplog.text.count("rank 3 cannot be reached") == 1
