"""The metrics page of a mock worker, under the names that vLLM and the agent of a real one use."""

from __future__ import annotations

from vllm_pd.router.histogram import Series
from vllm_pd.sim.mock_worker import MockWorker
from vllm_pd.state.block_index import Tier


def metrics_page(worker: MockWorker) -> str:
    """Prometheus text."""
    engine, counters, config = worker.live.engine, worker.counters, worker.config
    page = _Page(config.model)
    info = {"block_size": str(config.engine.block_size), "num_gpu_blocks": str(config.engine.gpu_blocks)}
    page.add("vllm:cache_config_info", "gauge", {"": 1}, **info, enable_prefix_caching="True")
    page.add("vllm:num_requests_running", "gauge", {"": engine.running})
    page.add("vllm:num_requests_waiting", "gauge", {"": engine.waiting})
    page.add("vllm:kv_cache_usage_perc", "gauge", {"": engine.kv_usage})
    page.add("vllm:prefix_cache_queries", "counter", {"_total": counters.queries})
    page.add("vllm:prefix_cache_hits", "counter", {"_total": counters.hits})
    page.add("vllm:external_prefix_cache_queries", "counter", {"_total": counters.queries - counters.hits})
    page.add("vllm:external_prefix_cache_hits", "counter", {"_total": counters.external_hits})
    page.add("vllm:num_preemptions", "counter", {"_total": engine.preemptions})
    page.add("vllm:prompt_tokens", "counter", {"_total": counters.prompt_tokens})
    by_source = {
        "local_compute": counters.prompt_tokens - counters.hits - counters.external_hits,
        "local_cache_hit": counters.hits,
        "external_kv_transfer": counters.external_hits,
    }
    for source, tokens in by_source.items():
        page.add("vllm:prompt_tokens_by_source", "counter", {"_total": tokens}, source=source)
    cached = {
        "device": counters.hits,
        "host": counters.cpu_hits,
        "disk": counters.ssd_hits,
        "p2p": counters.external_hits - counters.cpu_hits - counters.ssd_hits,
    }
    for source, tokens in cached.items():
        page.add("vllm:prompt_tokens_cached_by_source", "counter", {"_total": tokens}, source=source)
    page.add("vllm:generation_tokens", "counter", {"_total": counters.generation_tokens})
    for reason, count in (("length", counters.finished), ("abort", counters.aborted)):
        page.add("vllm:request_success", "counter", {"_total": count}, finished_reason=reason)
    page.histogram("vllm:time_to_first_token_seconds", counters.ttft)
    page.histogram("vllm:inter_token_latency_seconds", counters.itl)
    for outcome, moves in counters.moves.items():
        page.add("vllm_pd_role_moves", "counter", {"_total": moves}, outcome=outcome)
    page.histogram("vllm_pd_role_move_seconds", counters.move_seconds)
    for tier in (Tier.GPU, Tier.CPU, Tier.SSD):
        page.add("vllm_pd_mock_blocks", "gauge", {"": worker.blocks.count(tier)}, tier=str(tier.name).lower())
    if (prefill := worker.prefill_stats) is not None:
        page.add(
            "vllm_pd_agent_prefill_claimed", "counter", {"_total": prefill.claimed - prefill.stolen}, stolen="false"
        )
        page.add("vllm_pd_agent_prefill_claimed", "counter", {"_total": prefill.stolen}, stolen="true")
        for how, count in prefill.ended.items():
            page.add("vllm_pd_agent_prefill_ended", "counter", {"_total": count}, how=how)
        page.add("vllm_pd_agent_prefill_claimed_tokens", "gauge", {"": prefill.tokens})
    return page.text()


class _Page:
    def __init__(self, model: str) -> None:
        self._labels = {"engine": "0", "model_name": model}
        self._lines: list[str] = []
        self._typed: set[str] = set()

    def add(self, family: str, kind: str, values: dict[str, float], **labels: str) -> None:
        """Values by suffix of the family's name."""
        if family not in self._typed:
            self._typed.add(family)
            self._lines.append(f"# TYPE {family} {kind}")
        text = ",".join(f'{name}="{_escaped(value)}"' for name, value in (self._labels | labels).items())
        self._lines += [f"{family}{suffix}{{{text}}} {value:.10g}" for suffix, value in values.items()]

    def histogram(self, family: str, seconds: Series) -> None:
        for bound, count in seconds.buckets():
            self.add(family, "histogram", {"_bucket": count}, le=bound)
        self.add(family, "histogram", {"_sum": seconds.total, "_count": sum(seconds.counts)})

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
