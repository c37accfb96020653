"""Engines with tiers that are stopped in the end, and leave nothing behind."""

from __future__ import annotations

import os
import threading
import time
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
    # Other processes run such tests beside.
    assert not list(Path("/dev/shm").glob(f"vllm_offload_test_{os.getpid()}_*"))
    # One that hung on a disk ends when the disk lets it.
    deadline = time.monotonic() + 10
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [thread.name for thread in left] == []


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyIO]:
    """What every engine of the test reads and writes with."""
    faulty = FaultyIO(ThreadIO())

    def choose(backend: object, folder: Path) -> FaultyIO:
        # An engine that ends closes what it was given.
        faulty.inner = ThreadIO()
        return faulty

    monkeypatch.setattr("vllm_pd.kv_offload.ssd_place.choose", choose)
    yield faulty
    faulty.clear()
