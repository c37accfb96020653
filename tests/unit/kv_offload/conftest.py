"""Engines with tiers that are stopped in the end, and leave nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.kv_offload.faulty_io import FaultyIO
from vllm_pd.kv_offload.block_io.thread_io import ThreadIO


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., object]]:
    """Starts an engine whose SSD tier is in the test's folder."""
    from tests.unit.kv_offload.tiered import Engine

    threads = set(threading.enumerate())
    running: list[Engine] = []

    def make(**options: object) -> Engine:
        running.append(Engine(tmp_path, **options))  # type: ignore[arg-type]
        return running[-1]

    yield make
    for engine in running:
        engine.stop()
    assert not list(Path("/dev/shm").glob("vllm_offload_test_*"))
    left = [t.name for t in set(threading.enumerate()) - threads if not t.name.startswith(("pytest", "asyncio"))]
    assert left == []


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultyIO:
    """What every engine of the test reads and writes with."""
    faulty = FaultyIO(ThreadIO())
    monkeypatch.setattr("vllm_pd.kv_offload.ssd_place.choose", lambda backend, folder: faulty)
    return faulty
