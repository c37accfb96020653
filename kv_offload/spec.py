"""The offloading specs that vLLM's OffloadingConnector runs for vllm-pd.

`PDOffloadingSpec` keeps KV in host memory; `PDTieringOffloadingSpec` has files on an SSD below that. On CUDA, ROCm and
XPU both use vLLM's own worker unchanged. On the CPU platform, where vLLM refuses to offload, they copy memory to
memory.

Options (`kv_connector_extra_config` of the OffloadingConnector):
    cpu_bytes_to_use: bytes of host memory for KV, over all workers of this server; required.
    ssd: PDTieringOffloadingSpec only, required there; see `ssd_config.SsdConfig`.
    eviction_policy, blocks_per_chunk, block_size, offload_prompt_only, ...: as in vLLM.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload import cache_policy, gate_metrics, host_memory, ssd_metrics
from vllm_pd.kv_offload.dram_worker import DramOffloadingWorker
from vllm_pd.kv_offload.ssd_config import SsdConfig
from vllm_pd.vllm_compat import (
    CanonicalKVCaches,
    CPUOffloadingSpec,
    OffloadingConfig,
    OffloadingWorker,
    SecondaryTierFactory,
    SharedOffloadRegion,
    TieringOffloadingSpec,
    current_platform,
)

_SSD_TIER = "pd_ssd"
"""Its name with vLLM, in the labels of vLLM's metrics, too."""


class _HostMemoryTier:
    """What both specs add to vLLM's: checked sizes, and a worker for the CPU platform."""

    config: OffloadingConfig
    num_chunks: int
    kv_bytes_per_chunk: int
    cpu_page_size_per_worker: int
    blocks_per_chunk: int
    replicated_layout: bool
    _dram_worker: DramOffloadingWorker | None = None
    _uses_shared_region: Callable[[], bool]

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """vLLM's, and what the cost gate counts."""
        inherited = super().build_metric_definitions(extra_config)  # type: ignore[misc]
        return {**inherited, **gate_metrics.definitions()}

    def _check_size(self) -> None:
        """Raises SettingsError: the tier cannot hold one chunk, or this host cannot hold the tier."""
        if self.kv_bytes_per_chunk and self.num_chunks < 1:
            raise SettingsError(
                f"The CPU tier holds less than one chunk of {self.kv_bytes_per_chunk} bytes; raise --pd-cpu-gib or "
                f"--pd-cpu-percent (cpu_bytes_to_use) to at least {self.kv_bytes_per_chunk} bytes."
            )
        host_memory.check_possible(self._worker_bytes * self._workers_here)

    @property
    def _worker_bytes(self) -> int:
        return self.num_chunks * self.cpu_page_size_per_worker

    @property
    def _workers_here(self) -> int:
        """Workers of this server that share this host's memory: all of them, as far as it has devices."""
        workers = 1 if self.replicated_layout else int(self.config.parallel.world_size)
        if current_platform.is_cpu():
            return workers
        return max(1, min(workers, int(current_platform.device_count())))

    @property
    def _in_shared_memory(self) -> bool:
        """Whether the tier is a file in /dev/shm rather than memory of the worker's own."""
        return bool(self._uses_shared_region())

    def _make_dram_worker(self, kv_caches: CanonicalKVCaches) -> DramOffloadingWorker:
        return DramOffloadingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Worker side. Raises SettingsError: not enough memory is free, or the platform cannot offload."""
        if self._dram_worker is not None:
            return self._dram_worker
        if self.config.parallel.rank == 0 or not self.replicated_layout:
            host_memory.check_available(self._worker_bytes)
        if self._in_shared_memory:
            host_memory.check_shared(self.num_chunks * self.kv_bytes_per_chunk, self.config.engine_id)
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)  # type: ignore[misc]
        if not current_platform.is_cpu():
            raise SettingsError(
                f"KV tiers do not work on the platform {current_platform.device_name!r}; drop --pd-cpu-gib or use "
                "CUDA, ROCm, XPU or CPU."
            )
        if self.config.canonical_layout:
            raise SettingsError("canonical_layout does not work on the CPU platform; remove it from the tier options.")
        self._dram_worker = self._make_dram_worker(kv_caches)
        return self._dram_worker


class PDOffloadingSpec(_HostMemoryTier, CPUOffloadingSpec):  # type: ignore[misc]
    """KV in host memory, managed by vLLM's CPUOffloadingManager.

    Raises:
        SettingsError: an option is missing, malformed, or asks for more than the host has.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        _check_cpu_bytes(config.extra_config)
        if config.extra_config.get("ssd"):
            raise SettingsError("An SSD tier needs spec_name PDTieringOffloadingSpec; PDOffloadingSpec has none.")
        cache_policy.register()
        super().__init__(config)
        self._check_size()


class PDTieringOffloadingSpec(_HostMemoryTier, TieringOffloadingSpec):  # type: ignore[misc]
    """KV in host memory with an SSD below it: vLLM's tiering manager over our `SegmentTier`.

    The host memory is shared with the scheduler process, which moves blocks between it and the SSD.

    Raises:
        SettingsError: an option is missing, malformed, or asks for more than the host has.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        _check_cpu_bytes(config.extra_config)
        if config.extra_config.get("secondary_tiers"):
            raise SettingsError("secondary_tiers is set by vllm-pd from ssd; remove it from the tier options.")
        ssd = SsdConfig.parse(config.extra_config.get("ssd"))
        if _SSD_TIER not in SecondaryTierFactory._registry:
            SecondaryTierFactory.register_tier(_SSD_TIER, "vllm_pd.kv_offload.ssd_tier", "SegmentTier")
        options = {**config.extra_config, "secondary_tiers": [{"type": _SSD_TIER, "ssd": ssd}]}
        cache_policy.register()
        super().__init__(dataclasses.replace(config, extra_config=options))
        self._check_size()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Asked where the options are still the user's, in which vLLM finds no tier below host memory."""
        return {**super().build_metric_definitions(extra_config), **ssd_metrics.definitions()}

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Worker side; see `_HostMemoryTier.get_worker`."""
        if self._dram_worker is None:
            host_memory.remove_stale_regions()
            logging.getLogger(SharedOffloadRegion.__module__).addFilter(_is_news)
        return super().get_worker(kv_caches)

    def get_manager(self) -> Any:
        """Scheduler side. There is a scheduler when all workers of this host have the region, and nobody comes later:
        so it loses its name here, and the memory goes with the last process that has it, even if that is killed."""
        region = host_memory.region_path(self.config.engine_id)
        made_by_workers = region.exists()
        manager = super().get_manager()
        if made_by_workers:
            region.unlink(missing_ok=True)
        return manager

    def _make_dram_worker(self, kv_caches: CanonicalKVCaches) -> DramOffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            # Workers that hold identical KV share one copy.
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return DramOffloadingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, region)
        except Exception:
            region.cleanup()
            raise


def _is_news(record: logging.LogRecord) -> bool:
    """Whoever made a region takes its name away at the end, and vLLM shows a traceback where that is gone already."""
    return not (record.exc_info and isinstance(record.exc_info[1], FileNotFoundError))


def _check_cpu_bytes(extra: Any) -> None:
    size = extra.get("cpu_bytes_to_use")
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise SettingsError(f"cpu_bytes_to_use must be a positive whole number of bytes, got {size!r}.")
