"""What no cluster can undercut: every request alone on a worker that still holds whatever was ever prompted before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_pd.block_hash import BlockKey
from vllm_pd.sim.report import percentile
from vllm_pd.sim.timing import TimingModel
from vllm_pd.sim.trace import TraceRequest
from vllm_pd.sim.work import EngineConfig


@dataclass(frozen=True, slots=True)
class Floor:
    """Times to the first token in milliseconds, and the part of all prompt tokens that a cache can know."""

    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    hits: float


def floor(trace: Sequence[TraceRequest], timing: TimingModel, engine: EngineConfig) -> Floor:
    """The floor of a trace on workers that prefill what they decode."""
    known: set[BlockKey] = set()
    ttfts: list[float] = []
    cached = 0
    for request in trace:
        blocks = 0
        for key in request.keys[: (request.prompt - 1) // engine.block_size]:
            if key not in known:
                break
            blocks += 1
        known.update(request.keys)
        hit = blocks * engine.block_size
        cached += hit
        new = request.prompt - hit
        further_chunks = math.ceil(new / engine.max_num_batched_tokens) - 1
        ttfts.append(1000 * (timing.whole_prefill(new, hit) + further_chunks * timing.prefill_base))
    ttfts.sort()
    return Floor(
        sum(ttfts) / len(ttfts),
        percentile(ttfts, 50),
        percentile(ttfts, 99),
        cached / sum(request.prompt for request in trace),
    )
