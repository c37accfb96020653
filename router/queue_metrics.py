"""What the router counts of prefill work: by which way it went and how it ended, and what is in the queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_pd.router.queue_watch import PoolQueue

_PREFIX = "vllm_pd_router"


class DispatchMetrics:
    """Counters of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._dispatched = Counter(
            f"{_PREFIX}_prefill_dispatch_total",
            "Prefill legs by way (queue, direct) and how they ended there.",
            ["way", "outcome"],
            registry=registry,
        )
        self._direct = Counter(
            f"{_PREFIX}_prefill_direct_total",
            "Prefill legs that were sent directly although there is a queue, by reason.",
            ["reason"],
            registry=registry,
        )

    def ended(self, way: str, outcome: str) -> None:
        """Count the end of a leg on one way."""
        self._dispatched.labels(way, outcome).inc()

    def sent_directly(self, reason: str) -> None:
        """Count a leg that does not go through the queue."""
        self._direct.labels(reason).inc()


class QueueCollector(Collector):
    """The queues as this router saw them last. Every router of a store sees the same ones."""

    def __init__(self, pools: Callable[[], Sequence[PoolQueue]]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(f"{_PREFIX}_prefill_queue_up", "1 while the prefill queue is used.", labels=["pool"])
        labels = ["pool", "stream", "state"]
        requests = GaugeMetricFamily(
            f"{_PREFIX}_prefill_queue_requests",
            "Prefill jobs by stream (shared, own: those of single workers) and state (waiting, claimed).",
            labels=labels,
        )
        tokens = GaugeMetricFamily(
            f"{_PREFIX}_prefill_queue_tokens", "Prompt tokens of prefill jobs, likewise.", labels=labels
        )
        for queue in self._pools():
            up.add_metric([queue.pool], int(queue.up))
            for stream in ("shared", "own"):
                depths = [depth for owner, depth in queue.depths.items() if (owner is None) == (stream == "shared")]
                waiting, claimed = [queue.pool, stream, "waiting"], [queue.pool, stream, "claimed"]
                requests.add_metric(waiting, sum(depth.waiting for depth in depths))
                requests.add_metric(claimed, sum(depth.claimed for depth in depths))
                tokens.add_metric(waiting, sum(depth.waiting_tokens for depth in depths))
                tokens.add_metric(claimed, sum(depth.claimed_tokens for depth in depths))
        yield up
        yield requests
        yield tokens
