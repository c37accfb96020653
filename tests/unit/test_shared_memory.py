"""The check at the end of a run: it sees what the run's processes left, and only that."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.shared_memory import SHM, SharedMemoryWatch

MAKE = """
import sys
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(name=sys.argv[1], create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
print("made", flush=True)
sys.stdin.read()
"""
WITH_CHILD = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', *sys.argv[1:]]).returncode)"


@pytest.fixture
def name() -> Iterator[str]:
    name = f"vllm_pd_test_{uuid.uuid4().hex}"
    yield name
    Path(SHM, name).unlink(missing_ok=True)


@pytest.fixture
def run() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python program and waits for its first line; ends it after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_what_a_killed_process_of_the_run_left_is_found(name: str, run: Callable[..., subprocess.Popen[str]]) -> None:
    watch = SharedMemoryWatch()
    process = run(MAKE, name)
    watch.look()
    assert watch.left() == []
    process.kill()
    process.wait()
    assert watch.left() == [name]
    Path(SHM, name).unlink()
    assert watch.left() == []


def test_a_grandchild_whose_parent_ended_is_still_the_runs(
    name: str, run: Callable[..., subprocess.Popen[str]]
) -> None:
    watch = SharedMemoryWatch()
    parent = run(WITH_CHILD, MAKE, name)
    watch.look()
    parent.kill()
    parent.wait()
    assert watch.left() == []
    # The grandchild ends with its input.
    parent.communicate()
    deadline = time.monotonic() + 30
    while not (left := watch.left()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert left == [name]


def test_what_others_make_and_leave_is_none_of_the_runs(name: str, run: Callable[..., subprocess.Popen[str]]) -> None:
    family = subprocess.Popen(["sleep", "600"])
    try:
        watch = SharedMemoryWatch(family.pid)
        stranger = run(MAKE, name)
        watch.look()
        stranger.kill()
        stranger.wait()
        assert Path(SHM, name).exists()
        assert watch.left() == []
    finally:
        family.kill()
        family.wait()
