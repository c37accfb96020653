"""The specs as vLLM's factory builds them."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.kv_offload.cache import caches, strided
from tests.unit.kv_offload.engine import Request, offloading_config
from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload import host_memory
from vllm_pd.kv_offload import spec as spec_module
from vllm_pd.kv_offload.dram_worker import DramOffloadingWorker
from vllm_pd.kv_offload.spec import PDOffloadingSpec, PDTieringOffloadingSpec
from vllm_pd.vllm_compat import CPUOffloadingSpec, GPULoadStoreSpec, OffloadingSpecFactory

pytestmark = pytest.mark.vllm

PAGE = 8192
SPEC: dict[str, Any] = {"spec_name": "PDOffloadingSpec", "spec_module_path": "vllm_pd.kv_offload.spec"}


def blocks(ids: list[int]) -> Any:
    return GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[0])


def test_blocks_go_to_host_memory_and_back_through_vllms_manager() -> None:
    spec = OffloadingSpecFactory.create_spec(offloading_config({**SPEC, "cpu_bytes_to_use": 4 * PAGE}))
    assert isinstance(spec, PDOffloadingSpec)
    tensor = strided(8, PAGE)
    original = tensor.clone()
    worker = spec.get_worker(caches([tensor], [[(0, PAGE)]]))
    assert isinstance(worker, DramOffloadingWorker)
    assert spec.get_worker(caches([tensor], [[(0, PAGE)]])) is worker
    request = Request(spec.get_manager(), "a")
    try:
        assert request.store(worker, 1, [10, 11], blocks([2, 5]))
        tensor.zero_()
        assert request.lookup(10).name == request.lookup(11).name == "HIT"
        assert request.lookup(12).name == "MISS"
        request.load(worker, 2, [10, 11], blocks([7, 0]))
        assert torch.equal(tensor[[7, 0]], original[[2, 5]])
        # Four chunks fit; a fifth drives out the least recently used.
        assert request.store(worker, 3, [12, 13, 14], blocks([1, 3, 4]))
        assert request.lookup(10).name == "MISS"
        assert request.lookup(14).name == "HIT"
    finally:
        worker.shutdown()


@pytest.mark.parametrize("size", [None, 0, -1, "1GiB", 1.5, True])
def test_a_missing_or_malformed_size_is_refused(size: Any) -> None:
    with pytest.raises(SettingsError, match="cpu_bytes_to_use must be a positive whole number"):
        PDOffloadingSpec(offloading_config({"cpu_bytes_to_use": size}))


def test_a_tier_smaller_than_one_chunk_is_refused() -> None:
    with pytest.raises(SettingsError, match="less than one chunk of 8192 bytes"):
        PDOffloadingSpec(offloading_config({"cpu_bytes_to_use": PAGE - 1}))


def test_a_tier_larger_than_the_host_is_refused_at_start() -> None:
    with pytest.raises(SettingsError, match="does not fit this host"):
        PDOffloadingSpec(offloading_config({"cpu_bytes_to_use": 1 << 50}))


def test_a_tier_larger_than_what_is_free_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda *_: 1 << 20)
    spec = PDOffloadingSpec(offloading_config({"cpu_bytes_to_use": 1 << 30}))
    with pytest.raises(SettingsError, match=r"needs 1\.00 GiB here but only 0\.00 GiB"):
        spec.get_worker(caches([strided(8, PAGE)], [[(0, PAGE)]]))


def test_an_ssd_needs_the_tiering_spec() -> None:
    with pytest.raises(SettingsError, match="PDTieringOffloadingSpec"):
        PDOffloadingSpec(offloading_config({"cpu_bytes_to_use": PAGE, "ssd": {"path": "/x", "gib": 1}}))


@pytest.mark.parametrize(
    ("ssd", "message"),
    [
        (None, "must be an object"),
        ({"path": "/x", "gib": 1, "gob": 2}, "unknown key 'gob'"),
        ({"gib": 1}, "ssd.path"),
        ({"path": "/x"}, "ssd.gib"),
        ({"path": "/x", "gib": 0}, "ssd.gib must be a number above 0"),
        ({"path": "/x", "gib": 1, "identity": "m", "free_gib": -1}, "ssd.free_gib"),
    ],
)
def test_a_malformed_ssd_option_is_refused(ssd: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        PDTieringOffloadingSpec(offloading_config({"cpu_bytes_to_use": PAGE, "ssd": ssd}))


def test_an_ssd_folder_that_cannot_be_written_is_refused_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    spec = PDTieringOffloadingSpec(
        offloading_config(
            {"cpu_bytes_to_use": PAGE, "ssd": {"path": str(tmp_path / "file"), "gib": 1, "identity": "m"}}
        )
    )
    with pytest.raises(SettingsError, match="--pd-ssd-path"):
        spec.get_manager()
    assert not list(Path("/dev/shm").glob(f"*{spec.config.engine_id}*"))


def test_vllms_metrics_can_be_defined_from_our_options(tmp_path: Path) -> None:
    extra = {"cpu_bytes_to_use": PAGE, "ssd": {"path": str(tmp_path), "gib": 1}}
    assert PDOffloadingSpec.build_metric_definitions({"cpu_bytes_to_use": PAGE})
    assert PDTieringOffloadingSpec.build_metric_definitions(extra)


def platform(monkeypatch: pytest.MonkeyPatch, **answers: bool) -> None:
    kinds = {"is_cpu": False, "is_cuda_alike": False, "is_xpu": False, **answers}
    fake = SimpleNamespace(device_count=lambda: 8, device_name="toaster")
    for name, answer in kinds.items():
        setattr(fake, name, lambda answer=answer: answer)
    monkeypatch.setattr(spec_module, "current_platform", fake)


@pytest.mark.parametrize("kind", ["is_cuda_alike", "is_xpu"])
def test_on_a_gpu_vllms_own_worker_is_used(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    platform(monkeypatch, **{kind: True})
    theirs = object()
    monkeypatch.setattr(CPUOffloadingSpec, "get_worker", lambda self, kv_caches: theirs)
    spec = PDOffloadingSpec(offloading_config({"cpu_bytes_to_use": PAGE}))
    assert spec.get_worker(caches([strided(8, PAGE)], [[(0, PAGE)]])) is theirs


def test_another_platform_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    platform(monkeypatch)
    spec = PDOffloadingSpec(offloading_config({"cpu_bytes_to_use": PAGE}))
    with pytest.raises(SettingsError, match="platform 'toaster'"):
        spec.get_worker(caches([strided(8, PAGE)], [[(0, PAGE)]]))


def test_the_canonical_layout_is_refused_on_cpu() -> None:
    spec = PDOffloadingSpec(offloading_config({"cpu_bytes_to_use": PAGE}, canonical_layout=True))
    with pytest.raises(SettingsError, match="canonical_layout"):
        spec.get_worker(caches([strided(8, PAGE)], [[(0, PAGE)]]))


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", "adaptive"])
def test_the_policy_of_eviction_is_chosen_by_name(policy: str) -> None:
    spec = PDOffloadingSpec(offloading_config({"cpu_bytes_to_use": 4 * PAGE, "eviction_policy": policy}))
    assert spec.get_manager()._policy.cache_capacity == 4


def test_a_region_that_shared_memory_cannot_hold_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    extra = {"cpu_bytes_to_use": 4 * PAGE, "ssd": {"path": str(tmp_path), "gib": 1, "identity": "m"}}
    spec = PDTieringOffloadingSpec(offloading_config(extra))
    monkeypatch.setattr(host_memory.os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
    with pytest.raises(SettingsError, match="--shm-size"):
        spec.get_worker(caches([strided(8, PAGE)], [[(0, PAGE)]]))
    assert not list(Path("/dev/shm").glob(f"*{spec.config.engine_id}*"))


def test_shared_memory_loses_its_name_when_worker_and_scheduler_have_it(tmp_path: Path) -> None:
    """So the kernel takes it back when the last of them is gone, also if they are killed."""
    extra = {"cpu_bytes_to_use": 4 * PAGE, "ssd": {"path": str(tmp_path), "gib": 1, "free_gib": 0, "identity": "m"}}
    spec = PDTieringOffloadingSpec(offloading_config(extra))
    region = host_memory.region_path(spec.config.engine_id)
    tensor = strided(8, PAGE)
    original = tensor.clone()
    worker = spec.get_worker(caches([tensor], [[(0, PAGE)]]))
    try:
        assert region.exists(), "the scheduler has to find it"
        manager = spec.get_manager()
        try:
            assert not region.exists()
            request = Request(manager, "a")
            assert request.store(worker, 1, [10], blocks([2]))
            tensor.zero_()
            request.load(worker, 2, [10], blocks([7]))
            assert torch.equal(tensor[7], original[2])
        finally:
            manager.shutdown()
    finally:
        worker.shutdown()


def test_a_name_that_is_gone_already_is_no_news() -> None:
    def record(error: OSError | None) -> logging.LogRecord:
        about = (type(error), error, None) if error is not None else None
        return logging.LogRecord("vllm", logging.WARNING, "", 0, "Failed to unlink path", (), about)

    assert not spec_module._is_news(record(FileNotFoundError()))
    assert spec_module._is_news(record(PermissionError()))
    assert spec_module._is_news(record(None))
