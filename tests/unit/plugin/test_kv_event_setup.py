"""What `vllm serve --kv-connector pd` does about KV events, for each of what a user may have asked for."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_pd import kv_event_setup as setup

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

Make = Callable[..., Any]
PD = ("--kv-connector", "pd", "--pd-store", "redis://127.0.0.1:6379", "--pd-advertise-url", "http://h:1")


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the folders of sockets are made."""
    for name in (setup.INT_HASHES_ENV, setup.FOLDER_ENV):
        monkeypatch.delenv(name, raising=False)
    base = Path("/tmp") / f"kv-{os.getpid()}"
    base.mkdir(exist_ok=True)
    monkeypatch.setattr(setup.tempfile, "gettempdir", lambda: str(base))
    yield base
    subprocess.run(["rm", "-rf", str(base)], check=True)


def test_events_go_through_sockets_that_only_this_user_can_reach(engine_args: Make, folders: Path) -> None:
    config = engine_args(*PD).kv_events_config
    assert config.enable_kv_cache_events and config.publisher == "zmq"
    live, replay = config.endpoint, config.replay_endpoint
    assert live.startswith(f"ipc://{folders}/") and replay.startswith(f"ipc://{folders}/") and live != replay
    folder = Path(live.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.environ[setup.INT_HASHES_ENV] == "0"


def test_every_rank_has_sockets_of_its_own(engine_args: Make) -> None:
    from vllm.distributed.kv_events import ZmqEventPublisher

    config = engine_args(*PD, "--data-parallel-size", "3").kv_events_config
    endpoints = {
        ZmqEventPublisher.offset_endpoint_port(endpoint, rank)
        for endpoint in (config.endpoint, config.replay_endpoint)
        for rank in range(3)
    }
    assert len(endpoints) == 6
    assert all(endpoint.startswith("ipc://") and len(endpoint) < 100 for endpoint in endpoints)


def test_a_child_process_of_ours_uses_the_same_sockets_and_another_server_does_not(
    engine_args: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine_args(*PD).kv_events_config.endpoint
    assert engine_args(*PD).kv_events_config.endpoint == first
    folder = os.environ[setup.FOLDER_ENV].partition(":")[2]
    monkeypatch.setenv(setup.FOLDER_ENV, f"{os.getppid()}:{folder}")
    assert engine_args(*PD).kv_events_config.endpoint == first
    monkeypatch.setenv(setup.FOLDER_ENV, f"1234567:{folder}")
    assert engine_args(*PD).kv_events_config.endpoint != first


@pytest.mark.parametrize(
    "flags",
    [
        ("--headless", "--data-parallel-size", "2", "--data-parallel-size-local", "1"),
        ("--data-parallel-size", "4", "--data-parallel-size-local", "2"),
        ("--data-parallel-size", "2", "--data-parallel-backend", "ray"),
    ],
)  # fmt: skip
def test_engines_on_other_hosts_publish_where_they_can_be_reached(engine_args: Make, flags: tuple[str, ...]) -> None:
    config = engine_args(*PD, *flags).kv_events_config
    assert (config.endpoint, config.replay_endpoint) == ("tcp://*:0", "tcp://*:0")


@pytest.mark.parametrize(
    "flags",
    [
        ("--data-parallel-size", "4", "--data-parallel-rank", "2"),
        ("--data-parallel-size", "4", "--data-parallel-size-local", "2", "--data-parallel-start-rank", "2"),
        ("--data-parallel-size", "2", "--data-parallel-size-local", "2"),
    ],
)
def test_a_server_that_talks_to_its_own_engines_only_uses_sockets(engine_args: Make, flags: tuple[str, ...]) -> None:
    assert engine_args(*PD, *flags).kv_events_config.endpoint.startswith("ipc://")


def test_the_users_own_events_are_left_as_they_are(engine_args: Make) -> None:
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "mine"}
    config = engine_args(*PD, "--kv-events-config", json.dumps(given)).kv_events_config
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "mine")
    assert os.environ[setup.INT_HASHES_ENV] == "0"


@pytest.mark.parametrize(
    "given",
    [{"enable_kv_cache_events": False}, {"enable_kv_cache_events": True, "publisher": "null"}],
)
def test_events_that_the_user_turned_off_stay_off_with_a_warning(
    engine_args: Make, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.vllm_pd"):
        config = engine_args(*PD, "--kv-events-config", json.dumps(given)).kv_events_config
    assert config.publisher == "null"
    assert "drop the flag to be indexed" in caplog.text
    assert setup.INT_HASHES_ENV not in os.environ


def test_integer_hashes_that_the_user_asked_for_mean_no_index(
    engine_args: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(setup.INT_HASHES_ENV, "1")
    with caplog.at_level(logging.WARNING, "vllm.vllm_pd"):
        assert engine_args(*PD).kv_events_config is None
    assert f"{setup.INT_HASHES_ENV} is set" in caplog.text


@pytest.mark.parametrize("flags", [(), ("--kv-connector", "pd")])
def test_without_a_store_nothing_is_published(engine_args: Make, flags: tuple[str, ...]) -> None:
    assert engine_args(*flags).kv_events_config is None
    assert setup.INT_HASHES_ENV not in os.environ


def test_the_folder_goes_with_its_process_and_one_of_a_killed_process_with_the_next(folders: Path) -> None:
    make = (
        "import sys, tempfile; from vllm_pd import kv_event_setup as s; tempfile.gettempdir = lambda: sys.argv[1];"
        "print(s._folder(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", make, str(folders)]

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    killed, left = start()
    killed.kill()
    killed.wait()
    alive, used = start()
    assert left.is_dir(), "one that is that young may be in the making"
    long_ago = time.time() - 3600
    os.utime(left, (long_ago, long_ago))
    os.utime(used, (long_ago, long_ago))
    ended, own = start()
    assert not left.exists() and used.is_dir()
    ended.communicate()
    assert not own.exists()
    alive.communicate()
    assert not used.exists()


@pytest.mark.parametrize(
    ("options", "announced"), [({}, False), ({"eviction_policy": "arc"}, False), ({"blocks_per_chunk": 4}, True)]
)
def test_tiers_in_chunks_announce_each_block_of_a_chunk(options: dict[str, Any], announced: bool) -> None:
    from vllm_pd.settings import WorkerSettings
    from vllm_pd.transfer_config import child_configs

    worker = WorkerSettings(store="redis://h:1", cpu_gib=1.0, tiers=options)
    (tiers,) = child_configs(worker, nixl=False)
    assert tiers["kv_connector_extra_config"].get("self_describing_kv_events", False) is announced
    (tiers,) = child_configs(WorkerSettings(cpu_gib=1.0, tiers=options), nixl=False)
    assert "self_describing_kv_events" not in tiers["kv_connector_extra_config"]
