"""Copies on several cores: every byte once, whatever the ranges; and which cores those are."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.kv_offload import byte_copy
from vllm_pd.kv_offload.byte_copy import ParallelCopy, cores_of_process, run_on
from vllm_pd.kv_offload.copy_plan import CopyPlan, split


def plan_of(ranges: list[tuple[int, int, int]]) -> CopyPlan:
    """Of (source, target, size)."""
    src, dst, size = (np.array(column, dtype=np.uint64) for column in zip(*ranges, strict=True))
    return CopyPlan(src, dst, size, int(size.sum()))


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=30), parts=st.integers(1, 6))
def test_the_parts_of_a_plan_copy_each_byte_once(sizes: list[int], parts: int) -> None:
    starts = np.cumsum([0, *sizes[:-1]])
    plan = plan_of([(int(start), int(start) + 10_000_000, size) for start, size in zip(starts, sizes, strict=True)])
    made = split(plan, parts)
    assert len(made) <= parts and sum(part.total_bytes for part in made) == plan.total_bytes
    at = 0
    for part in made:
        assert part.total_bytes == int(part.size.sum())
        for src, dst, size in zip(part.src, part.dst, part.size, strict=True):
            assert (int(src), int(dst)) == (at, at + 10_000_000) and size > 0
            at += int(size)
    assert at == plan.total_bytes
    if parts > 1 and plan.total_bytes > 100_000:
        assert max(part.total_bytes for part in made) - min(part.total_bytes for part in made) <= 2 * 4096


def buffers(size: int) -> tuple[Any, Any]:
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    return source, np.zeros(size, dtype=np.uint8)


def test_a_large_plan_is_copied_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3 * byte_copy.PART_BYTES + 12_345
    source, target = buffers(size)
    threads: set[int] = set()
    together = threading.Barrier(3)

    def seen(plan: CopyPlan) -> None:
        together.wait(30)
        threads.add(threading.get_ident())
        byte_copy.compiled()(plan.src, plan.dst, plan.size)

    monkeypatch.setattr(byte_copy, "copy", seen)
    copy = ParallelCopy({0, 1, 2})
    try:
        # A small range first, so that the cuts fall into the large one.
        copy(
            plan_of(
                [
                    (source.ctypes.data, target.ctypes.data, 999),
                    (source.ctypes.data + 999, target.ctypes.data + 999, size - 999),
                ]
            )
        )
    finally:
        copy.stop()
    assert len(threads) == 3
    assert np.array_equal(source, target)


def test_a_small_plan_stays_with_the_caller_and_so_does_every_plan_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(byte_copy, "copy", lambda plan: threads.append(threading.get_ident()))
    for cores, size in (({0, 1}, 2 * byte_copy.PART_BYTES - 1), ({0}, 64 * byte_copy.PART_BYTES)):
        copy = ParallelCopy(cores)
        copy(plan_of([(0, 0, size)]))
        copy.stop()
    assert threads == [threading.get_ident()] * 2


def test_no_more_threads_than_cores_and_not_many() -> None:
    for cores, threads in ((1, 1), (2, 2), (64, byte_copy.MOST_THREADS)):
        copy = ParallelCopy(set(range(cores)))
        assert copy.threads == threads
        copy.stop()


def test_after_the_end_the_caller_copies_alone() -> None:
    source, target = buffers(2 * byte_copy.PART_BYTES)
    copy = ParallelCopy({0, 1})
    copy.stop()
    copy.stop()
    copy(plan_of([(source.ctypes.data, target.ctypes.data, len(source))]))
    assert np.array_equal(source, target)


def test_an_error_of_one_part_is_the_error_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = threading.get_ident()

    def fails_elsewhere(plan: CopyPlan) -> None:
        if threading.get_ident() != caller:
            raise MemoryError("injected")

    monkeypatch.setattr(byte_copy, "copy", fails_elsewhere)
    copy = ParallelCopy({0, 1})
    with pytest.raises(MemoryError, match="injected"):
        copy(plan_of([(0, 0, 2 * byte_copy.PART_BYTES)]))
    copy.stop()


def test_no_part_is_still_copied_once_the_error_of_another_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = threading.get_ident()
    under_way, go_on = threading.Event(), threading.Event()
    ended: list[bool] = []

    def fails_here(plan: CopyPlan) -> None:
        if threading.get_ident() == caller:
            assert under_way.wait(30)
            threading.Timer(0.05, go_on.set).start()
            raise MemoryError("injected")
        under_way.set()
        ended.append(go_on.wait(30))

    monkeypatch.setattr(byte_copy, "copy", fails_here)
    copy = ParallelCopy({0, 1})
    with pytest.raises(MemoryError, match="injected"):
        copy(plan_of([(0, 0, 2 * byte_copy.PART_BYTES)]))
    assert ended == [True]
    copy.stop()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_thread_started_by_a_pinned_one_may_use_what_the_others_have() -> None:
    """vLLM pins the main thread of a CPU worker; threads that it starts inherit that."""
    whole = os.sched_getaffinity(0)
    free = threading.Event()
    other = threading.Thread(target=free.wait, args=(30,))
    other.start()
    found: list[set[int]] = []

    def inherited() -> None:
        found.append(os.sched_getaffinity(0))
        run_on(cores_of_process())
        found.append(os.sched_getaffinity(0))

    try:
        os.sched_setaffinity(0, {min(whole)})
        thread = threading.Thread(target=inherited)
        thread.start()
        thread.join(30)
    finally:
        os.sched_setaffinity(0, whole)
        free.set()
        other.join(30)
    assert found == [{min(whole)}, whole]
