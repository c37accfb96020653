"""The state of the tokenizers as Prometheus metrics, read when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_pd.router.tokenizer_cache import TokenizerCache

_PREFIX = "vllm_pd_router"


class TokenizerCollector(Collector):
    """How many tokenizers there are, how many of them fastokens serves, and what is kept of prompts."""

    def __init__(self, tokenizers: TokenizerCache) -> None:
        self._tokenizers = tokenizers

    def collect(self) -> Iterator[Metric]:
        ready = self._tokenizers.ready
        yield GaugeMetricFamily(f"{_PREFIX}_tokenizers", "Tokenizers in use.", len(ready))
        yield GaugeMetricFamily(
            f"{_PREFIX}_tokenizers_fast",
            "Tokenizers for which fastokens is used.",
            sum(tokenizer.encoder.fast for tokenizer in ready),
        )
        yield CounterMetricFamily(
            f"{_PREFIX}_tokenizer_mismatches",
            "Tokenizers for which fastokens was given up because it gave other tokens.",
            self._tokenizers.mismatches,
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}_prompt_cache_bytes", "Memory for what is kept of earlier prompts.", self._tokenizers.kept_bytes
        )
