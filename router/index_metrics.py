"""The state of the block index as Prometheus metrics, read when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_pd.router.index_watch import IndexWatch
from vllm_pd.router.self_check import SelfCheck

_PREFIX = "vllm_pd_router"


class IndexCollector(Collector):
    """Blocks by cache and tier, how old the index is, and whether prompts are hashed as the engines do."""

    def __init__(self, index: IndexWatch, check: SelfCheck) -> None:
        self._index = index
        self._check = check

    def collect(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            f"{_PREFIX}_index_blocks", "Blocks known to be held.", labels=["worker", "rank", "tier"]
        )
        pool_gauges = {
            name: GaugeMetricFamily(f"{_PREFIX}_index_{name}", text, labels=["pool"])
            for name, text in (
                ("distinct_blocks", "Different blocks known to be held by any worker."),
                ("loaded", "1 once the index has been complete."),
                ("age_seconds", "Time since the index was as new as the store."),
            )
        }
        counters = {
            name: CounterMetricFamily(f"{_PREFIX}_index_{name}", text, labels=["pool"])
            for name, text in (
                ("changes", "Changes applied to the index."),
                ("changed_blocks", "Blocks stated by changes and snapshots."),
                ("snapshots", "Caches read whole."),
                ("gaps", "Caches that were read again because changes were missing."),
            )
        }
        for mirror in self._index.mirrors:
            for holder in mirror.prefixes.holders():
                for tier, count in mirror.prefixes.count(holder).items():
                    blocks.add_metric([holder.worker, str(holder.rank), (tier.name or "").lower()], count)
            pool = [str(mirror.pool)]
            pool_gauges["distinct_blocks"].add_metric(pool, len(mirror.prefixes))
            pool_gauges["loaded"].add_metric(pool, int(mirror.loaded))
            pool_gauges["age_seconds"].add_metric(pool, mirror.age())
            counters["changes"].add_metric(pool, mirror.counts.changes)
            counters["changed_blocks"].add_metric(pool, mirror.counts.blocks)
            counters["snapshots"].add_metric(pool, mirror.counts.snapshots)
            counters["gaps"].add_metric(pool, mirror.counts.gaps)
        yield blocks
        yield from pool_gauges.values()
        yield from counters.values()
        mismatch = GaugeMetricFamily(
            f"{_PREFIX}_hash_mismatch",
            "1 while prompts of a pool are not looked up because its workers hash them in another way.",
            labels=["pool"],
        )
        for name, problem in self._check.problems().items():
            mismatch.add_metric([str(name)], int(bool(problem)))
        yield mismatch
