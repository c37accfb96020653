"""Fixtures that all tests share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from scripts.models import smollm2_dir, tiny_model_dir
from tests.shared_memory import SharedMemoryWatch
from vllm_pd.graph.embedded_store import EmbeddedStore

SHM_DEADLINE_S = 30.0


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Where tests run in several processes, those of a file stay together, and those on real servers are one group."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "servers" if file.startswith("tests/e2e/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    return _Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def shared_memory_is_as_it_was_found() -> Iterator[None]:
    """Fails the run if it leaves something in /dev/shm that nobody uses: a server left it behind."""
    watch = SharedMemoryWatch()
    watch.start()
    yield
    watch.stop()
    deadline = time.monotonic() + SHM_DEADLINE_S
    while left := watch.left():
        if time.monotonic() > deadline:
            pytest.fail(f"left behind in /dev/shm: {', '.join(left)}")
        time.sleep(0.2)


@pytest.fixture(scope="session")
def store_url() -> Iterator[str]:
    """URL of an embedded store that lives as long as the run. Tests share it: use a namespace of your own."""
    with EmbeddedStore() as store:
        yield store.url


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the random Llama; built once per checkout."""
    return tiny_model_dir()


@pytest.fixture(scope="session")
def smollm2_model() -> Path:
    """Folder of SmolLM2-135M-Instruct; built once per checkout."""
    return smollm2_dir()
