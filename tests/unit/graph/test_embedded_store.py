"""The embedded store: starts, answers, ends, and starts empty again."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from vllm_pd.errors import StoreError
from vllm_pd.graph import embedded_store
from vllm_pd.graph.embedded_store import EmbeddedStore


def client(store: EmbeddedStore) -> redis.Redis:
    return redis.Redis.from_url(store.url, socket_timeout=5.0)


def test_starts_empty_on_the_same_port_after_a_crash() -> None:
    with EmbeddedStore() as store:
        client(store).set("a", "1")
        port, pid = store.port, store.pid
        store.kill()
        assert store.pid == 0
        store.start()
        assert store.port == port
        assert store.pid != pid
        assert client(store).get("a") is None


def test_password_is_required_and_is_in_the_url() -> None:
    with EmbeddedStore(password="s3cret") as store:
        assert client(store).ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=store.port).ping()


def test_a_paused_store_can_be_stopped_and_leaves_no_folder() -> None:
    store = EmbeddedStore().start()
    folder = Path(str(client(store).config_get("dir")["dir"]))
    store.pause()
    store.stop()
    store.stop()
    assert not folder.exists()


def test_a_store_ends_with_the_process_that_started_it_even_if_that_is_killed() -> None:
    code = (
        "import redis, time; from vllm_pd.graph.embedded_store import EmbeddedStore; s = EmbeddedStore().start();"
        "print(s.port, redis.Redis(port=s.port).config_get('dir')['dir'], flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    port, folder = parent.stdout.readline().split()
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()
        except OSError:
            if not Path(folder).exists():
                break
        assert time.monotonic() < deadline, "the store or its folder is still there"
        time.sleep(0.05)


def test_a_store_that_cannot_start_says_why() -> None:
    with pytest.raises(StoreError, match="no-such-option"):
        EmbeddedStore(options={"no-such-option": "1"}).start()


def test_a_missing_binary_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded_store.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match=r"vllm-pd\[embedded\]"):
        EmbeddedStore().start()
