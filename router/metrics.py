"""What the router counts, as Prometheus metrics in a registry of its own. Gauges are read when scraped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_pd.router.breaker import Trouble
from vllm_pd.router.decision import UNSERVED_IF_STRICT, Reason
from vllm_pd.router.directory import Directory
from vllm_pd.router.histogram import Histogram, Series

CLIENT_GONE = 499
"""Status counted for a client that left before its answer was complete."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_OVERHEAD = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25)
_ERROR_SECONDS = (-10.0, -3.0, -1.0, -0.3, -0.1, -0.03, -0.01, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_ERROR_BLOCKS = (-1000.0, -100.0, -10.0, -3.0, -1.0, 0.0, 1.0, 3.0, 10.0, 100.0, 1000.0)
_PREFIX = "vllm_pd_router"


class _DirectoryCollector(Collector):
    """Workers, their requests in flight and the store, as the directory has them now."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        inflight = GaugeMetricFamily(
            f"{_PREFIX}_inflight_requests", "Requests of this router on a worker now.", labels=["worker"]
        )
        for worker in self._directory.workers:
            inflight.add_metric([worker.id], worker.inflight)
        yield inflight
        workers = GaugeMetricFamily(f"{_PREFIX}_workers", "Known workers by role.", labels=["role"])
        for role, count in self._directory.count_by_role().items():
            workers.add_metric([role], count)
        yield workers
        info = GaugeMetricFamily(
            f"{_PREFIX}_worker_info",
            "1 for each known worker, with its role, pool and first model now.",
            labels=["worker", "role", "pool", "model"],
        )
        usable = GaugeMetricFamily(
            f"{_PREFIX}_worker_usable",
            "1 when nothing is wrong with a worker, 0 when it is left out.",
            labels=["worker"],
        )
        blocks = GaugeMetricFamily(
            f"{_PREFIX}_worker_kv_blocks",
            "Blocks of a worker's GPU-side KV cache, where it said so.",
            labels=["worker"],
        )
        for worker in self._directory.workers:
            models = worker.record.models
            if worker.record.kv_blocks:
                blocks.add_metric([worker.id], worker.record.kv_blocks)
            info.add_metric([worker.id, worker.role, worker.pool, models[0] if models else ""], 1)
            usable.add_metric([worker.id], int(worker.breaker.trouble is Trouble.NONE))
        yield from (info, usable, blocks)
        moving = GaugeMetricFamily(
            f"{_PREFIX}_workers_moving", "Known workers that drain for another role, by that role.", labels=["role"]
        )
        for role, count in self._directory.count_moving().items():
            moving.add_metric([role], count)
        yield moving
        troubled = GaugeMetricFamily(
            f"{_PREFIX}_workers_in_trouble", "Known workers that are left out, by what is wrong.", labels=["trouble"]
        )
        for trouble in Trouble:
            if trouble is not Trouble.NONE:
                count = sum(worker.breaker.trouble is trouble for worker in self._directory.workers)
                troubled.add_metric([trouble.name.lower()], count)
        yield troubled
        store = self._directory.store
        yield GaugeMetricFamily(
            f"{_PREFIX}_store_configured", "1 when the router was given a store.", int(store.configured)
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}_store_up", "1 when the store answered the last time it was asked.", int(store.up)
        )


class RouterMetrics:
    """All metrics of one router."""

    def __init__(self, directory: Directory) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_DirectoryCollector(directory))
        self._requests = Counter(
            f"{_PREFIX}_requests_total",
            f"Finished requests; status {CLIENT_GONE} is a client that left early.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.split = Counter(
            f"{_PREFIX}_split_total",
            "Requests prefilled on one worker and decoded on another.",
            registry=self.registry,
        )
        self._bypass = Counter(
            f"{_PREFIX}_bypass_total",
            "Requests sent whole to a decode worker, by reason.",
            ["reason"],
            registry=self.registry,
        )
        refused = Counter(
            f"{_PREFIX}_refused_total",
            "Requests that --require-prefill refused for want of a worker that prefills for others, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.refused: dict[Reason, Counter] = {reason: refused.labels(reason) for reason in sorted(UNSERVED_IF_STRICT)}
        self.prefill_fallback = Counter(
            f"{_PREFIX}_prefill_fallback_total",
            "Requests whose prefill leg failed and that were then sent whole, by reason.",
            ["reason"],
            registry=self.registry,
        )
        unread = Counter(
            f"{_PREFIX}_unread_handoffs_total",
            "Requests that were sent whole although another leg had computed their prompts: to the worker that did it "
            "(own_blocks), or because a decode worker before may have read the blocks (perhaps_read).",
            ["reason"],
            registry=self.registry,
        )
        self.unread_own, self.unread_lost = unread.labels("own_blocks"), unread.labels("perhaps_read")
        self.decode_retries = Counter(
            f"{_PREFIX}_decode_retry_total",
            "Requests sent to another worker before the first byte, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.releases = Counter(
            f"{_PREFIX}_released_handoffs_total",
            "Hand-offs that nobody will read, by whether their prefill worker let the blocks go at once.",
            ["outcome"],
            registry=self.registry,
        )
        self.given_up = Counter(
            f"{_PREFIX}_given_up_handoffs_total",
            "Hand-offs whose decode leg ended before its first byte: the decode worker was told (delivered), or why "
            "not; those are left to their lease.",
            ["outcome"],
            registry=self.registry,
        )
        self.handed_over_streams = Counter(
            f"{_PREFIX}_handed_over_streams_total",
            "Streams that another worker went on with because theirs changes its role: continued, or failed to be.",
            ["outcome"],
            registry=self.registry,
        )
        self.broken_streams = Counter(
            f"{_PREFIX}_broken_streams_total",
            "Streams that a worker broke off: continued by another, completed, failed to be, or ended with an error "
            "event and why.",
            ["outcome", "why"],
            registry=self.registry,
        )
        self.continuation_seconds = Histogram(
            f"{_PREFIX}_continuation_seconds",
            "From noticing that a stream broke off to its next event, by another worker.",
            _SECONDS,
            self.registry,
        ).labels()
        self.legs_ended = Counter(
            f"{_PREFIX}_legs_ended_total",
            "Requests taken from a worker that gives no sign of life (down), computes nothing (stuck), lost them, or "
            "reads from a prefill worker that gives no sign of life (source_down).",
            ["reason"],
            registry=self.registry,
        )
        self._request_seconds = Histogram(
            f"{_PREFIX}_request_seconds",
            "From the request's head to the end of its answer.",
            _SECONDS,
            self.registry,
            ["endpoint"],
        )
        self._ttft = Histogram(
            f"{_PREFIX}_ttft_seconds",
            "From the request's head to the first byte of its answer's body.",
            _SECONDS,
            self.registry,
            ["mode"],
        )
        self.prefill_seconds = Histogram(
            f"{_PREFIX}_prefill_leg_seconds",
            "From sending the prefill leg to its complete answer.",
            _SECONDS,
            self.registry,
        ).labels()
        self.overhead_seconds = Histogram(
            f"{_PREFIX}_proxy_overhead_seconds",
            "The router's own time from a complete request body to the decode leg, without the prefill leg.",
            _OVERHEAD,
            self.registry,
        ).labels()
        self.ttft_error = Histogram(
            f"{_PREFIX}_ttft_prediction_error_seconds",
            "Time to the first token of a streamed answer minus its prediction.",
            _ERROR_SECONDS,
            self.registry,
        ).labels()
        self.hashing_seconds = Histogram(
            f"{_PREFIX}_hashing_seconds",
            "Rendering, tokenizing and hashing a prompt, with the wait for a thread.",
            _OVERHEAD,
            self.registry,
        ).labels()
        self.lookup_seconds = Histogram(
            f"{_PREFIX}_lookup_seconds", "One prompt in the block index.", _OVERHEAD, self.registry
        ).labels()
        self.scheduling_seconds = Histogram(
            f"{_PREFIX}_scheduling_seconds", "Lookup and choice of the engines.", _OVERHEAD, self.registry
        ).labels()
        self._decisions = Counter(
            f"{_PREFIX}_decisions_total",
            "Choices of a worker for an answer, by policy and why it was that one.",
            ["policy", "reason"],
            registry=self.registry,
        )
        self._unknown = Counter(
            f"{_PREFIX}_unknown_prompts_total",
            "Requests whose blocks were not looked up, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.looked_up = Counter(
            f"{_PREFIX}_known_prompts_total", "Requests whose blocks were looked up.", registry=self.registry
        )
        self.prompt_tokens = Counter(
            f"{_PREFIX}_known_prompt_tokens_total",
            "Prompt tokens of requests whose blocks were looked up.",
            registry=self.registry,
        )
        self._cached_tokens = Counter(
            f"{_PREFIX}_cached_tokens_total",
            "Prompt tokens that came from a cache, as predicted and as the workers' answers said, where they did.",
            ["source"],
            registry=self.registry,
        )
        for source in ("predicted", "reported"):
            self._cached_tokens.labels(source)
        self._overlap_error = Histogram(
            f"{_PREFIX}_overlap_error_blocks",
            "Blocks that came from a cache, by the worker's answer, minus those predicted.",
            _ERROR_BLOCKS,
            self.registry,
        ).labels()
        self._decided: dict[tuple[str, str], Counter] = {}
        self._why: dict[str, Counter] = {}
        # Every reason is there from the start, so that a rate over it is never undefined.
        self.bypass: dict[Reason, Counter] = {
            reason: self._bypass.labels(reason) for reason in Reason if reason is not Reason.SPLIT
        }
        self._finished: dict[tuple[str, int], tuple[Counter, Series]] = {}
        self.ttft_split = self._ttft.labels("split")
        self.ttft_whole = self._ttft.labels("whole")

    def finished(self, endpoint: str, status: int, started: float) -> None:
        """Count a finished request. `started` is `time.monotonic()` at its head; status 0 means nothing was sent."""
        found = self._finished.get((endpoint, status))
        if found is None:
            counter = self._requests.labels(endpoint, str(status or CLIENT_GONE))
            found = self._finished[endpoint, status] = (counter, self._request_seconds.labels(endpoint))
        found[0].inc()
        found[1].observe(time.monotonic() - started)

    def decided(self, policy: str, reason: str) -> None:
        """Count a choice."""
        found = self._decided.get((policy, reason))
        if found is None:
            found = self._decided[policy, reason] = self._decisions.labels(policy, reason)
        found.inc()

    def prompt_unknown(self, reason: str) -> None:
        """Count a request whose blocks were not looked up."""
        found = self._why.get(reason)
        if found is None:
            found = self._why[reason] = self._unknown.labels(reason)
        found.inc()

    def cached(self, predicted: int, reported: int, block_size: int) -> None:
        """Compare cached prompt tokens of one answer, in tokens."""
        self._cached_tokens.labels("predicted").inc(predicted)
        self._cached_tokens.labels("reported").inc(reported)
        self._overlap_error.observe((reported - predicted) / block_size)

    def page(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


def status_name(status: int) -> str:
    """`4xx`-style class of a status with 429 and 503 apart: these are the worker's back-pressure, and neither the
    client's mistake nor a failure."""
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return f"status_{status:d}"
    return f"status_{status // 100}xx"
