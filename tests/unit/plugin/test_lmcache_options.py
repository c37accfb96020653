"""What can be said about LMCache, and what is refused before an engine starts."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pd import lmcache_options, lmcache_setup
from vllm_pd.errors import SettingsError
from vllm_pd.settings import WorkerSettings, from_extra_config, load_worker_settings


def error(**settings: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load_worker_settings(file=settings)
    return str(caught.value)


def test_the_tiers_are_what_keeps_blocks_unless_another_is_named() -> None:
    assert WorkerSettings().offload == "tiers"
    assert not WorkerSettings().has_tiers and WorkerSettings(cpu_gib=1.0).has_tiers


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"offload": "lmcash"}, ["did you mean 'lmcache'"]),
        ({"offload": {"eviction_policy": "arc"}}, ["tiers, lmcache, none", "given as tiers"]),
        ({"offload": "lmcache", "cpu_gib": 1}, ["--pd-cpu-gib", "--pd-offload tiers"]),
        ({"offload": "lmcache", "ssd_path": "/x", "ssd_gib": 1, "cpu_gib": 1}, ["--pd-ssd-path"]),
        ({"offload": "lmcache", "tiers": {"eviction_policy": "arc"}}, ["tiers"]),
        ({"offload": "none", "cpu_gib": 1}, ["contradict"]),
        ({"offload": "lmcache", "eviction": "lru"}, ["--pd-eviction", "--pd-offload lmcache"]),
        ({"offload": "none", "load_gate": "always"}, ["--pd-load-gate", "--pd-offload none"]),
        ({"lmcache_url": "tcp://h:1"}, ["add --pd-offload lmcache"]),
        ({"lmcache": {"mq_timeout": 1}, "cpu_gib": 1}, ["add --pd-offload lmcache"]),
        ({"offload": "lmcache", "lmcache_url": "h"}, ["tcp://HOST:PORT"]),
        ({"offload": "lmcache", "lmcache_url": "http://h:1"}, ["tcp://HOST:PORT"]),
        ({"offload": "lmcache", "lmcache_url": "tcp://u:p@h:1"}, ["tcp://HOST:PORT", "***"]),
        ({"offload": "lmcache", "lmcache": {"mq_timeot": 1}}, ["did you mean 'mq_timeout'"]),
        ({"offload": "lmcache", "lmcache": {"mq_timeout": 0}}, ["mq_timeout", "above 0"]),
        ({"offload": "lmcache", "lmcache": {"lmcache.mp.host": "h"}}, ["--pd-lmcache-url"]),
        ({"offload": "lmcache", "lmcache": {"autostart": True}}, ["lmcache server"]),
        ({"offload": "lmcache", "lmcache": {"connector": "LMCacheConnectorV1"}}, ["no CPU path"]),
        ({"offload": "lmcache", "lmcache": 3}, ["mapping"]),
    ],
)
def test_what_contradicts_itself_ends_with_one_sentence(settings: dict[str, Any], words: list[str]) -> None:
    sentence = error(**settings)
    assert sentence.endswith(".")
    for word in words:
        assert word in sentence


def test_options_reach_lmcache_by_its_own_names_with_defaults_of_ours() -> None:
    worker = load_worker_settings(
        file={"offload": "lmcache", "lmcache_url": "cache1:6000", "lmcache": {"lmcache.mp.save_decode_cache": True}}
    ).value
    assert from_extra_config(worker.to_extra_config()) == worker
    made = lmcache_options.connector_options(worker.lmcache_url, worker.lmcache)
    assert made == {
        "lmcache.mp.host": "tcp://cache1",
        "lmcache.mp.port": 6000,
        "lmcache.mp.mq_timeout": 5.0,
        "lmcache.mp.heartbeat_interval": 2.0,
        "lmcache.mp.mp_transfer_mode": "engine_driven",
        "lmcache.mp.save_decode_cache": True,
    }


def test_an_ipv6_address_keeps_its_brackets() -> None:
    assert lmcache_options.connector_options("tcp://[::1]:6000", {})["lmcache.mp.host"] == "tcp://[::1]"


def test_a_server_that_is_not_there_is_named_before_the_engine_starts() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(SettingsError, match=rf"tcp://127\.0\.0\.1:{port} .*lmcache server .*--pd-lmcache-url"):
        lmcache_setup.wait_for_server(f"tcp://127.0.0.1:{port}", 0.3)


def test_a_server_that_comes_a_little_later_is_waited_for() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        lmcache_setup.wait_for_server(f"tcp://127.0.0.1:{listening.getsockname()[1]}", 5.0)


def test_without_the_package_the_sentence_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_options.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="pip install --no-deps lmcache=="):
        lmcache_setup.check("tcp://localhost:1", SimpleNamespace())


def test_sleep_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_options, "check_installed", lambda: None)
    monkeypatch.setattr(lmcache_options, "version", lambda: lmcache_options.TESTED)
    with pytest.raises(SettingsError, match="--enable-sleep-mode"):
        lmcache_setup.check("tcp://localhost:1", SimpleNamespace(enable_sleep_mode=True))


def test_another_version_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(lmcache_options, "check_installed", lambda: None)
    monkeypatch.setattr(lmcache_options, "version", lambda: "0.9.0")
    monkeypatch.setattr(lmcache_setup, "wait_for_server", lambda url, wait_s: None)
    with caplog.at_level("WARNING", logger="vllm.vllm_pd"):
        lmcache_setup.check("tcp://localhost:1", SimpleNamespace(enable_sleep_mode=False))
    assert "0.9.0" in caplog.text
