"""A server's tiers without the server: vLLM's tiering manager over the SSD tier, the DRAM worker beside it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.kv_offload.cache import caches, strided
from tests.unit.kv_offload.engine import PATIENCE_S, Request, key, offloading_config
from vllm_pd.kv_offload.spec import PDTieringOffloadingSpec
from vllm_pd.kv_offload.ssd_config import ROOT_NAME
from vllm_pd.vllm_compat import GPULoadStoreSpec, OffloadingConnectorStats, ReqContext

PAGE = 8192
CHUNKS = 4
MIB = 1 << 20
BUDGET = 16 * MIB
GIB = 1 << 30


def blocks(ids: list[int]) -> Any:
    return GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[0])


class Engine:
    """Scheduler and worker half of one server, as far as tiers are concerned.

    Args:
        folder: of the SSD tier.
        chunks: of the host memory.
        events: KV events are on.
        ssd: further options of the SSD tier.
        changes: of the offloading configuration.
    """

    def __init__(
        self,
        folder: Path,
        *,
        chunks: int = CHUNKS,
        events: bool = False,
        ssd: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        options = {"path": str(folder), "gib": BUDGET / GIB, "free_gib": 0, "identity": "tests", **(ssd or {})}
        parallel = changes.pop("parallel", {})
        config = offloading_config(
            {"cpu_bytes_to_use": chunks * PAGE, "ssd": options},
            bytes_per_block=PAGE,
            enable_kv_cache_events=events,
            **changes,
        )
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **parallel))
        self.spec = PDTieringOffloadingSpec(config)
        self.cache = strided(64, PAGE)
        self.worker = self.spec.get_worker(caches([self.cache], [[(0, PAGE)]]))
        try:
            self.manager = self.spec.get_manager()
        except BaseException:
            self.worker.shutdown()
            raise
        self.tier = self.manager.secondary_tiers[0]
        self.jobs = itertools.count()
        self.others = itertools.count(10_000)
        self._metrics = OffloadingConnectorStats()
        self.told: list[tuple[bool, set[Any]]] = []
        self.stopped = False

    def request(self, name: str) -> Request:
        return Request(self.manager, name, self._show)

    def store(self, request: Request, numbers: list[int], ids: list[int]) -> None:
        """Take blocks of the cache over to host memory, and see what becomes of them."""
        assert request.store(self.worker, next(self.jobs), numbers, blocks(ids))
        request.settle()

    def load(self, request: Request, numbers: list[int], ids: list[int]) -> None:
        request.load(self.worker, next(self.jobs), numbers, blocks(ids))

    def settle(self) -> None:
        """Step, as an idle engine does, until there is nothing left to do."""
        idle = self.request("idle")
        idle.settle(each=lambda: self.told.extend(self.events()))
        idle.finish()

    def found(self, request: Request, numbers: list[int]) -> list[str]:
        return [request.lookup(number).name for number in numbers]

    def forget_memory(self) -> None:
        """What is in host memory gives way to other blocks, which the SSD gets, too."""
        request = self.request("others")
        self.store(request, [next(self.others) for _ in range(CHUNKS)], [60 + n for n in range(CHUNKS)])
        request.finish()

    def reset(self, *, done: bool = True) -> None:
        """As a reset of all caches; it is not done where a running request holds blocks, and then only of these."""
        self.manager.reset_cache()
        if done:
            self.tier.caches_were_reset()

    def held(self, numbers: list[int]) -> list[bool]:
        context = ReqContext(req_id="held")
        return [self.tier.holds(key(number), context) for number in numbers]

    def events(self) -> list[tuple[bool, set[Any]]]:
        """The storage tier's: removed?, keys."""
        return [(event.removed, set(event.keys)) for event in self.tier.take_events()]

    def metric(self, name: str, *labels: str) -> float:
        """A counter since the start, or a gauge."""
        self._show(self.tier.get_stats())
        return self.shown(name, *labels)

    def shown(self, name: str, *labels: str) -> float:
        """The same as of the end of the last step."""
        return float(self._metrics.data["data"].get(f"vllm_pd_ssd_{name}", {}).get(labels, 0))

    def _show(self, stats: OffloadingConnectorStats | None) -> None:
        if stats is not None:
            self._metrics.aggregate(stats)

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            self.worker.shutdown()
            self.manager.shutdown()


def segments(folder: Path) -> list[Path]:
    return sorted((folder / ROOT_NAME).rglob("*.kv"))


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)
