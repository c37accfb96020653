"""The DRAM worker with real tensors, threads and vLLM's own job descriptions."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kv_offload.cache import caches, strided
from vllm_pd.errors import PDError
from vllm_pd.kv_offload import byte_copy, dram_worker
from vllm_pd.kv_offload.copy_plan import CopyPlan
from vllm_pd.kv_offload.dram_worker import DramOffloadingWorker
from vllm_pd.vllm_compat import CPULoadStoreSpec, GPULoadStoreSpec, SharedOffloadRegion

pytestmark = pytest.mark.vllm

PATIENCE_S = 30.0


def blocks_spec(blocks: list[int], sizes: list[int] | None = None, indices: list[int] | None = None) -> Any:
    return GPULoadStoreSpec(blocks, group_sizes=sizes or [len(blocks)], block_indices=indices or [0])


def collect(worker: DramOffloadingWorker, count: int) -> list[Any]:
    """Poll as vLLM does until `count` results came."""
    results: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(results) < count:
        assert time.monotonic() < deadline, f"only {len(results)} of {count} jobs finished"
        results += worker.get_finished()
        time.sleep(0.001)
    return results


@pytest.fixture
def make_worker() -> Iterator[Callable[..., DramOffloadingWorker]]:
    made: list[DramOffloadingWorker] = []

    def make(*args: Any, **kwargs: Any) -> DramOffloadingWorker:
        made.append(DramOffloadingWorker(*args, **kwargs))
        return made[-1]

    yield make
    for worker in made:
        worker.shutdown()


class Gate:
    """A copy that waits until the test opens it."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()

    def __call__(self, plan: CopyPlan) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        byte_copy.copy(plan)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_blocks_come_back_as_they_were(data: st.DataObject) -> None:
    """Store, overwrite, load into other blocks: chunked, grouped, padded, strided, with unaligned ends."""
    per_chunk = data.draw(st.integers(1, 4))
    pages = data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=3))
    tensors = [strided(24, page, data.draw(st.integers(0, 7))) for page in pages]
    group_count = data.draw(st.integers(1, 2))
    # Groups may use the same tensors (vLLM overlays them); within one transfer they use different blocks.
    groups = [[(i, data.draw(st.integers(1, page))) for i, page in enumerate(pages)] for _ in range(group_count)]
    sizes = [data.draw(st.integers(0, 8)) for _ in groups]
    store_indices = [per_chunk * data.draw(st.integers(0, 3)) for _ in groups]
    chunk_counts = [-(-size // per_chunk) for size in sizes]
    order = data.draw(st.permutations(range(24)))
    blocks = list(order[: sum(sizes)])
    chunks = list(data.draw(st.permutations(range(20)))[: sum(chunk_counts)])

    worker = DramOffloadingWorker(caches(tensors, groups), per_chunk, 20)
    try:
        originals = [t.clone() for t in tensors]
        worker.submit_store(1, blocks_spec(blocks, sizes, store_indices), CPULoadStoreSpec(chunks))
        worker.wait({1})
        for tensor in tensors:
            tensor.zero_()

        # A load may begin inside the first chunk.
        skips = [data.draw(st.integers(0, min(per_chunk - 1, size))) if size else 0 for size in sizes]
        load_sizes = [size - skip for size, skip in zip(sizes, skips, strict=True)]
        targets = list(reversed(order))[: sum(load_sizes)]
        load_chunks, at = [], 0
        for size, count in zip(load_sizes, chunk_counts, strict=True):
            load_chunks += chunks[at : at + count] if size else []
            at += count
        indices = [index + skip for index, skip in zip(store_indices, skips, strict=True)]
        worker.submit_load(2, CPULoadStoreSpec(load_chunks), blocks_spec(targets, load_sizes, indices))
        results = collect(worker, 2)
        assert [r.job_id for r in results] == [1, 2]
        assert all(r.success for r in results)

        expected = [torch.zeros_like(t) for t in originals]
        moved = at_source = at_target = 0
        for refs, size, skip in zip(groups, sizes, skips, strict=True):
            for place in range(skip, size):
                source, target = blocks[at_source + place], targets[at_target]
                at_target += 1
                for tensor, used in refs:
                    expected[tensor][target, :used] = originals[tensor][source, :used]
                    moved += used
            at_source += size
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, wanted)
        assert results[1].transfer_size == moved
    finally:
        worker.shutdown()


def test_many_jobs_both_ways_at_once_keep_their_data_apart(make_worker: Callable[..., DramOffloadingWorker]) -> None:
    """Stores of 32 requests are loaded back, as soon as each is reported, while later ones are still being stored."""
    tensors = [strided(256, 512) for _ in range(4)]
    originals = [t.clone() for t in tensors]
    worker = make_worker(caches(tensors, [[(i, 512) for i in range(4)]]), 2, 64)
    sources = list(range(128))
    chunks = list(range(64))
    random.Random(0).shuffle(sources)
    random.Random(1).shuffle(chunks)
    for job in range(32):
        worker.submit_store(
            job, blocks_spec(sources[4 * job : 4 * job + 4]), CPULoadStoreSpec(chunks[2 * job : 2 * job + 2])
        )
    loaded = 0
    deadline = time.monotonic() + PATIENCE_S
    while loaded < 32:
        assert time.monotonic() < deadline
        for result in worker.get_finished():
            assert result.success
            job = result.job_id % 100
            targets = list(range(128 + 4 * job, 132 + 4 * job))
            if result.job_id < 100:
                worker.submit_load(100 + job, CPULoadStoreSpec(chunks[2 * job : 2 * job + 2]), blocks_spec(targets))
                continue
            loaded += 1
            for tensor, original in zip(tensors, originals, strict=True):
                assert torch.equal(tensor[targets], original[sources[4 * job : 4 * job + 4]])


def test_a_store_is_not_reported_before_it_is_complete(make_worker: Callable[..., DramOffloadingWorker]) -> None:
    gate = Gate()
    worker = make_worker(caches([strided(4, 16)], [[(0, 16)]]), 1, 4, copy=gate)
    worker.submit_store(1, blocks_spec([0]), CPULoadStoreSpec([0]))
    assert gate.entered.wait(PATIENCE_S)
    assert worker.get_finished() == []
    gate.opened.set()
    assert [r.job_id for r in collect(worker, 1)] == [1]


def test_the_fence_returns_only_after_the_blocks_were_read(make_worker: Callable[..., DramOffloadingWorker]) -> None:
    gate = Gate()
    tensor = strided(4, 16)
    original = tensor.clone()
    worker = make_worker(caches([tensor], [[(0, 16)]]), 1, 4, copy=gate)
    worker.submit_store(1, blocks_spec([2]), CPULoadStoreSpec([3]))
    assert gate.entered.wait(PATIENCE_S)
    passed = threading.Event()

    def overwrite() -> None:
        worker.wait({1, 99})
        passed.set()

    fenced = threading.Thread(target=overwrite)
    fenced.start()
    assert not passed.wait(0.05)
    gate.opened.set()
    fenced.join(PATIENCE_S)
    assert passed.is_set()
    tensor[2] = 0
    worker.submit_load(2, CPULoadStoreSpec([3]), blocks_spec([1]))
    worker.wait({2})
    assert torch.equal(tensor[1], original[2])


def test_the_fence_ignores_jobs_it_does_not_name(make_worker: Callable[..., DramOffloadingWorker]) -> None:
    gate = Gate()
    worker = make_worker(caches([strided(4, 16)], [[(0, 16)]]), 1, 4, copy=gate)
    worker.submit_store(1, blocks_spec([0]), CPULoadStoreSpec([0]))
    worker.wait({7})
    assert worker.get_finished() == []
    gate.opened.set()


def test_a_load_does_not_queue_behind_stores(make_worker: Callable[..., DramOffloadingWorker]) -> None:
    tensor = strided(4, 16)
    gate = Gate()
    stores = threading.Event()

    def copy(plan: CopyPlan) -> None:
        if stores.is_set():
            byte_copy.copy(plan)
        else:
            stores.set()
            gate(plan)

    worker = make_worker(caches([tensor], [[(0, 16)]]), 1, 4, copy=copy)
    worker.submit_store(1, blocks_spec([0]), CPULoadStoreSpec([0]))
    assert gate.entered.wait(PATIENCE_S)
    worker.submit_load(2, CPULoadStoreSpec([1]), blocks_spec([1]))
    assert [r.job_id for r in collect(worker, 1)] == [2]
    gate.opened.set()


def test_a_fence_that_never_opens_stops_the_engine(
    make_worker: Callable[..., DramOffloadingWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dram_worker, "FENCE_DEADLINE_S", 0.01)
    gate = Gate()
    worker = make_worker(caches([strided(4, 16)], [[(0, 16)]]), 1, 4, copy=gate)
    worker.submit_store(1, blocks_spec([0]), CPULoadStoreSpec([0]))
    with pytest.raises(PDError, match="did not end"):
        worker.wait({1})
    gate.opened.set()


class Failing:
    """A copy that raises the first `times` times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, plan: CopyPlan) -> None:
        if self.left:
            self.left -= 1
            raise MemoryError("injected")
        byte_copy.copy(plan)


@pytest.mark.parametrize("fence", [True, False])
def test_a_copy_that_failed_once_is_repeated_before_it_is_reported(
    make_worker: Callable[..., DramOffloadingWorker], fence: bool
) -> None:
    tensor = strided(4, 16)
    original = tensor.clone()
    worker = make_worker(caches([tensor], [[(0, 16)]]), 1, 4, copy=Failing(1))
    worker.submit_store(1, blocks_spec([0]), CPULoadStoreSpec([0]))
    if fence:
        worker.wait({1})
    assert [r.success for r in collect(worker, 1)] == [True]
    worker.submit_load(2, CPULoadStoreSpec([0]), blocks_spec([3]))
    assert [r.success for r in collect(worker, 1)] == [True]
    assert torch.equal(tensor[3], original[0])


def test_a_copy_that_cannot_be_done_is_never_reported_as_done(
    make_worker: Callable[..., DramOffloadingWorker],
) -> None:
    worker = make_worker(caches([strided(4, 16)], [[(0, 16)]]), 1, 4, copy=Failing(99))
    worker.submit_load(1, CPULoadStoreSpec([0]), blocks_spec([0]))
    assert [r.success for r in collect(worker, 1)] == [False]


def test_a_job_outside_the_cache_is_refused_at_submission(make_worker: Callable[..., DramOffloadingWorker]) -> None:
    worker = make_worker(caches([strided(4, 16)], [[(0, 16)]]), 1, 4)
    with pytest.raises(ValueError, match="block 4"):
        worker.submit_store(1, blocks_spec([4]), CPULoadStoreSpec([0]))
    with pytest.raises(ValueError, match="chunk 4"):
        worker.submit_load(2, CPULoadStoreSpec([4]), blocks_spec([0]))
    assert worker.get_finished() == []


def test_shutdown_completes_jobs_in_flight_and_ends_the_threads() -> None:
    gate = Gate()
    tensor = strided(4, 16)
    worker = DramOffloadingWorker(caches([tensor], [[(0, 16)]]), 1, 4, copy=gate)
    names = {"vllm_pd_kv_store", "vllm_pd_kv_load"}
    mine = {t for t in threading.enumerate() if t.name in names}
    assert len(mine) == 2
    for job in range(3):
        worker.submit_store(job, blocks_spec([job]), CPULoadStoreSpec([job]))
    assert gate.entered.wait(PATIENCE_S)
    threading.Timer(0.02, gate.opened.set).start()
    worker.shutdown()
    assert not any(t.is_alive() for t in mine)
    assert [r.job_id for r in worker.get_finished()] == [0, 1, 2]
    worker.shutdown()


def test_shared_region_is_used_and_leaves_nothing_behind() -> None:
    name = f"test_{uuid.uuid4().hex}"
    tensors = [strided(8, 64), strided(8, 32)]
    region = SharedOffloadRegion(
        engine_id=name, num_chunks=4, rank=0, kv_bytes_per_chunk=4096, cpu_page_size=(64 + 32) * 2
    )
    path = Path(f"/dev/shm/vllm_offload_{name}.mmap")
    assert path.stat().st_size == 4 * 4096
    worker = DramOffloadingWorker(caches(tensors, [[(0, 64), (1, 32)]]), 2, 4, region)
    originals = [t.clone() for t in tensors]
    worker.submit_store(1, blocks_spec([1, 2, 3]), CPULoadStoreSpec([3, 0]))
    worker.wait({1})
    # Chunk 3 begins with its two blocks of the first tensor: that is what the SSD tier will write.
    assert path.read_bytes()[3 * 4096 :][:128] == originals[0][1:3].numpy().tobytes()
    for tensor in tensors:
        tensor.zero_()
    worker.submit_load(2, CPULoadStoreSpec([3, 0]), blocks_spec([5, 6, 7]))
    worker.wait({2})
    for tensor, original in zip(tensors, originals, strict=True):
        assert torch.equal(tensor[5:8], original[1:4])
    worker.shutdown()
    assert not path.exists()


def test_a_copy_of_many_ranges_lets_other_python_threads_run() -> None:
    tensor = strided(1 << 18, 64)
    plans: list[CopyPlan] = []
    worker = DramOffloadingWorker(caches([tensor], [[(0, 32)]]), 1, 1 << 18, copy=plans.append)
    try:
        worker.submit_store(1, blocks_spec(list(range(1 << 18))), CPULoadStoreSpec(list(range(1 << 18))))
        worker.wait({1})
        assert len(plans[0].size) == 1 << 18
        ended = threading.Event()

        def copy() -> None:
            for _ in range(10):
                byte_copy.copy(plans[0])
            ended.set()

        thread = threading.Thread(target=copy)
        thread.start()
        steps = 0
        while not ended.is_set():
            steps += 1
        thread.join()
        # With the lock held throughout each copy this loop would turn a handful of times.
        assert steps > 1000
    finally:
        worker.shutdown()
