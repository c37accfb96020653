"""What the SSD tier shows on vLLM's /metrics. vLLM adds the labels of the model and the engine, and `_total`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_pd.kv_offload.segments import StoreStats
from vllm_pd.vllm_compat import OffloadingConnectorStats, OffloadingCounterMetadata, OffloadingGaugeMetadata

_PREFIX = "vllm_pd_ssd_"

BUDGET = f"{_PREFIX}budget_bytes"
OFF = f"{_PREFIX}off"
LOADS_FAILED = f"{_PREFIX}loads_failed_blocks"
REFUSED = f"{_PREFIX}refused_blocks"
LOST = f"{_PREFIX}lost_blocks"
LOOKUPS_OFF = f"{_PREFIX}lookups_off"
SWITCHED_OFF = f"{_PREFIX}switched_off"
PROBES = f"{_PREFIX}probes"

LOAD, STORE = "load", "store"
FIRST_TIME, OUTDATED = "first_time", "outdated"
"""Reasons for not taking a block over, besides the store's."""

_GAUGES = {
    "blocks": "Blocks that can be loaded from the SSD tier.",
    "segments": "Segment files of this namespace.",
    "used_bytes": "Size of those files.",
    "staged_bytes": "Taken over by the SSD tier and not yet written.",
    "queued_load_bytes": "Asked of the SSD tier and not yet loaded.",
}
"""Of `StoreStats`, as they are."""

_COUNTERS = {
    "written_blocks": "Blocks written to the SSD tier.",
    "written_bytes": "Bytes of blocks written to the SSD tier.",
    "failed_writes": "Writes of several blocks, and flushes, that the disk refused.",
    "read_blocks": "Blocks loaded from the SSD tier.",
    "read_bytes": "Bytes loaded from the SSD tier.",
    "duplicate_blocks": "Blocks offered to the SSD tier that it had already.",
    "evicted_blocks": "Blocks that left the SSD tier with their segment.",
    "evicted_segments": "Segments removed to make room.",
    "rewritten_blocks": "Blocks in use that were written again when their segment was evicted.",
    "recovered_blocks": "Blocks of earlier runs found at start.",
    "foreign_segments": "Segments of other, unused namespaces removed to make room.",
    "rejected_segments": "Files found at start that cannot be used.",
}
"""Of `StoreStats`, whose fields end in `_total`."""


def definitions() -> dict[str, Any]:
    """By name, as an offloading spec lists them."""
    gauges = {f"{_PREFIX}{name}": OffloadingGaugeMetadata(documentation=text) for name, text in _GAUGES.items()}
    counters = {f"{_PREFIX}{name}": OffloadingCounterMetadata(documentation=text) for name, text in _COUNTERS.items()}
    return {
        **gauges,
        **counters,
        BUDGET: OffloadingGaugeMetadata(documentation="Bytes that the SSD tier may use."),
        OFF: OffloadingGaugeMetadata(
            documentation="1 while a direction of the SSD tier (load, store) is switched off because it kept failing.",
            labelnames=("direction",),
        ),
        SWITCHED_OFF: OffloadingCounterMetadata(
            documentation="How often a direction of the SSD tier was switched off.", labelnames=("direction",)
        ),
        PROBES: OffloadingCounterMetadata(
            documentation="Trials of a direction that is switched off, by result (fine, failed).",
            labelnames=("direction", "result"),
        ),
        LOADS_FAILED: OffloadingCounterMetadata(
            documentation="Blocks that could not be loaded from the SSD tier and are computed, by reason.",
            labelnames=("reason",),
        ),
        LOOKUPS_OFF: OffloadingCounterMetadata(
            documentation="Lookups of blocks that were not loaded because the SSD tier was switched off."
        ),
        REFUSED: OffloadingCounterMetadata(
            documentation="Blocks not taken over by the SSD tier, by reason: first_time is the admission filter.",
            labelnames=("reason",),
        ),
        LOST: OffloadingCounterMetadata(
            documentation="Blocks taken over that could not be written, by reason.", labelnames=("reason",)
        ),
    }


class SsdCounts:
    """Collects between two looks of vLLM's."""

    def __init__(self) -> None:
        self._stats = OffloadingConnectorStats()
        self._before: dict[tuple[str, tuple[str, ...]], int] = {}

    def count(self, name: str, amount: int = 1, *labels: str) -> None:
        if amount:
            self._stats.increase_counter(name, amount, labels)

    def new_store(self) -> None:
        """The next snapshot is another store's, whose counters begin anew."""
        self._before.clear()

    def snapshot(self, store: StoreStats) -> None:
        """Take over the store's gauges, and how far its counters grew since the last snapshot."""
        for name in _GAUGES:
            self._stats.set_gauge(f"{_PREFIX}{name}", getattr(store, name))
        for name, labels, value in _totals(store):
            grown = value - self._before.get((name, labels), 0)
            self._before[name, labels] = value
            self.count(name, grown, *labels)

    def gauge(self, name: str, value: float, *labels: str) -> None:
        self._stats.set_gauge(name, value, labels)

    def take(self) -> OffloadingConnectorStats:
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats


def _totals(store: StoreStats) -> Iterator[tuple[str, tuple[str, ...], int]]:
    for name in _COUNTERS:
        yield f"{_PREFIX}{name}", (), getattr(store, f"{name}_total")
    by_reason: Mapping[str, Mapping[Any, int]] = {
        LOADS_FAILED: store.loads_failed,
        REFUSED: store.puts_refused,
        LOST: store.puts_lost,
    }
    for name, reasons in by_reason.items():
        for reason, value in reasons.items():
            yield name, (str(reason),), value
