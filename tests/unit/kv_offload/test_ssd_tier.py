"""The SSD tier with real files, vLLM's tiering manager above it and the DRAM worker beside it."""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.kv_offload.cache import caches, strided
from tests.unit.kv_offload.engine import Request, key, offloading_config
from vllm_pd.kv_offload.spec import PDTieringOffloadingSpec
from vllm_pd.kv_offload.ssd_config import ROOT_NAME, model_identity, namespace
from vllm_pd.vllm_compat import GPULoadStoreSpec

pytestmark = pytest.mark.vllm

PAGE = 8192
CHUNKS = 4
PATIENCE_S = 30.0


def blocks(ids: list[int]) -> Any:
    return GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[0])


class Engine:
    """Scheduler and worker half of one server, as far as tiers are concerned."""

    def __init__(self, folder: Path, gib: float = 1.0, events: bool = False) -> None:
        ssd = {"path": str(folder), "gib": gib, "free_gib": 0}
        self.spec = PDTieringOffloadingSpec(
            offloading_config(
                {"cpu_bytes_to_use": CHUNKS * PAGE, "ssd": ssd}, bytes_per_block=PAGE, enable_kv_cache_events=events
            )
        )
        self.cache = strided(32, PAGE)
        self.worker = self.spec.get_worker(caches([self.cache], [[(0, PAGE)]]))
        self.manager = self.spec.get_manager()
        self.jobs = iter(range(1, 1000))
        self.tier = self.manager.secondary_tiers[0]
        deadline = time.monotonic() + PATIENCE_S
        while self.tier._budget.used_bytes is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def request(self, name: str) -> Request:
        return Request(self.manager, name)

    def store(self, request: Request, numbers: list[int], ids: list[int]) -> None:
        assert request.store(self.worker, next(self.jobs), numbers, blocks(ids))
        request.settle()

    def load(self, request: Request, numbers: list[int], ids: list[int]) -> None:
        request.load(self.worker, next(self.jobs), numbers, blocks(ids))

    def stop(self) -> None:
        self.worker.shutdown()
        self.manager.shutdown()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    running: list[Engine] = []

    def make(**options: Any) -> Engine:
        running.append(Engine(tmp_path, **options))
        return running[-1]

    yield make
    for engine in running:
        engine.stop()
    assert not list(Path("/dev/shm").glob("vllm_offload_test_*"))


def files(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.rglob("*.bin"))


def test_blocks_driven_out_of_memory_come_back_from_the_ssd(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start()
    original = engine.cache.clone()
    first = engine.request("a")
    engine.store(first, [1, 2, 3, 4], [0, 1, 2, 3])
    engine.store(first, [5, 6, 7, 8], [4, 5, 6, 7])
    first.finish()
    assert len(files(tmp_path)) == 8
    engine.cache.zero_()
    second = engine.request("b")
    assert [second.lookup(n).name for n in (1, 2)] == ["HIT", "HIT"]
    engine.load(second, [1, 2], [10, 11])
    assert torch.equal(engine.cache[10:12], original[:2])


def test_blocks_survive_a_restart(start: Callable[..., Engine]) -> None:
    engine = start()
    original = engine.cache.clone()
    request = engine.request("a")
    engine.store(request, [1, 2], [3, 4])
    request.finish()
    again = start()
    request = again.request("b")
    assert [request.lookup(n).name for n in (1, 2, 3)] == ["HIT", "HIT", "MISS"]
    again.load(request, [1, 2], [0, 1])
    assert torch.equal(again.cache[:2], original[3:5])


def test_a_file_deleted_before_the_lookup_is_a_miss(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start()
    request = engine.request("a")
    engine.store(request, [1], [0])
    request.finish()
    files(tmp_path)[0].unlink()
    again = start()
    assert again.request("b").lookup(1).name == "MISS"


def test_a_file_deleted_between_lookup_and_load_is_a_miss_and_the_rest_is_kept(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    """The lookup sees all three files; the second is gone when the promotion reads it."""
    engine = start()
    original = engine.cache.clone()
    request = engine.request("a")
    engine.store(request, [1, 2, 3], [0, 1, 2])
    request.finish()
    again = start()
    request = again.request("b")
    # First step: the existence of all three is asked for and confirmed.
    for number in (1, 2, 3):
        assert again.manager.lookup(key(number), request.context).name == "RETRY"
    request.step()
    deadline = time.monotonic() + PATIENCE_S
    while again.tier._lookup_manager._pending_results.empty():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    # Second step: they are found and promotions are queued, to be read at the end of the step.
    for number in (1, 2, 3):
        assert again.manager.lookup(key(number), request.context).name == "HIT_PENDING"
    files(tmp_path)[1].unlink()
    request.step()
    assert [request.lookup(n).name for n in (1, 2, 3)] == ["HIT", "MISS", "MISS"]
    again.load(request, [1], [9])
    assert torch.equal(again.cache[9], original[0])
    # The request computes what is missing and stores it: that works, and the next request finds all of it.
    again.store(request, [2, 3], [1, 2])
    request.finish()
    later = again.request("c")
    assert [later.lookup(n).name for n in (1, 2, 3)] == ["HIT", "HIT", "HIT"]


def test_a_truncated_file_is_a_miss_and_is_replaced(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start()
    request = engine.request("a")
    engine.store(request, [1], [0])
    request.finish()
    path = files(tmp_path)[0]
    os.truncate(path, PAGE // 2)
    again = start()
    request = again.request("b")
    assert request.lookup(1).name == "MISS"
    again.store(request, [1], [5])
    assert path.read_bytes() == again.cache[5].numpy().tobytes()


def test_a_full_budget_drops_writes_and_serves_on_from_memory(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start(gib=6 * (PAGE + 4096) / (1 << 30))
    request = engine.request("a")
    for first in range(0, 24, 2):
        engine.store(request, [first, first + 1], [0, 1])
        assert request.lookup(first).name == "HIT"
        taken = sum(p.lstat().st_blocks * 512 for p in (tmp_path / ROOT_NAME).rglob("*.bin"))
        assert taken <= 6 * (PAGE + 4096)
    assert files(tmp_path)


def test_others_cannot_read_the_folder(start: Callable[..., Engine], tmp_path: Path) -> None:
    start()
    assert stat.S_IMODE((tmp_path / ROOT_NAME).stat().st_mode) == 0o700


def test_whatever_changes_the_bytes_of_a_block_changes_the_folder(tmp_path: Path) -> None:
    base = offloading_config({})
    weights = tmp_path / "model"
    weights.mkdir()
    (weights / "w.safetensors").write_bytes(b"1")
    local = dataclasses.replace(base, model=dataclasses.replace(base.model, name=str(weights)))
    names = [
        namespace(base, ""),
        namespace(base, "another revision"),
        namespace(dataclasses.replace(base, kv_cache_layout="BLHNC"), ""),
        namespace(dataclasses.replace(base, worker_kv_bytes_per_block=1), ""),
        namespace(dataclasses.replace(base, model=dataclasses.replace(base.model, dtype="float16")), ""),
        namespace(local, ""),
    ]
    (weights / "w.safetensors").write_bytes(b"other weights")
    names.append(namespace(local, ""))
    assert len(set(names)) == len(names)
    assert namespace(base, "") == namespace(dataclasses.replace(base, engine_id="other"), "")
    assert all("/" not in name and not name.startswith(".") for name in names)


def test_the_models_identity_covers_revision_and_architecture() -> None:
    def engine(**changes: Any) -> Any:
        model = {"revision": "main", "dtype": "bfloat16", "quantization": None, "rope": 1, **changes}
        hf_config = SimpleNamespace(to_dict=lambda: {"rope_theta": model["rope"]})
        return SimpleNamespace(
            model_config=SimpleNamespace(**model, hf_config=hf_config),
            cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256_cbor"),
        )

    identities = {
        model_identity(engine(**c))
        for c in ({}, {"revision": "v2"}, {"dtype": "float16"}, {"quantization": "fp8"}, {"rope": 2})
    }
    assert len(identities) == 5
    assert model_identity(engine()) == model_identity(engine())


def said(engine: Engine) -> list[tuple[bool, set[Any]]]:
    """The storage tier's events: removed?, keys."""
    return [(event.removed, set(event.keys)) for event in engine.tier.take_events()]


def test_what_is_on_the_ssd_is_told_from_the_start_and_as_it_comes_and_goes(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    first = start(events=True)
    request = first.request("a")
    first.store(request, [1, 2, 3, 4], [0, 1, 2, 3])
    request.finish()
    assert said(first) == [(False, {key(1), key(2), key(3), key(4)})]
    assert said(first) == []

    again = start(events=True)
    assert said(again) == [(False, {key(1), key(2), key(3), key(4)})]
    # Somebody else's hand.
    [gone] = [file for file in files(tmp_path) if file.stem == (2).to_bytes(32, "big").hex()]
    gone.unlink()
    (gone.parent / "no block.bin").write_bytes(b"")
    again.tier._budget.scan_and_evict()
    assert said(again) == [(True, {key(2)})]
    # The budget's.
    again.tier._budget._delete(again.tier._budget._scan().oldest, 1)
    [(removed, keys)] = said(again)
    assert removed and len(keys) == 1


def test_without_kv_events_the_ssd_says_nothing(start: Callable[..., Engine]) -> None:
    engine = start()
    request = engine.request("a")
    engine.store(request, [1], [0])
    request.finish()
    assert said(engine) == []
