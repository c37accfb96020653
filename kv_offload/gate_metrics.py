"""What the cost gate shows on vLLM's /metrics."""

from __future__ import annotations

from typing import Any

from vllm_pd.kv_offload.cost_gate import Decision
from vllm_pd.vllm_compat import OffloadingConnectorStats, OffloadingCounterMetadata, OffloadingGaugeMetadata

DECISIONS = "vllm_pd_offload_gate_decisions"
BLOCKS = "vllm_pd_offload_gate_blocks"
BREAK_EVEN = "vllm_pd_offload_break_even_tokens"
LATENCY = "vllm_pd_offload_tier_latency_seconds"
SPEED = "vllm_pd_offload_tier_bytes_per_second"
TOKEN = "vllm_pd_offload_prefill_token_seconds"

_CHOICE = ("tier", "decision", "reason")


def definitions() -> dict[str, Any]:
    """By name, as an offloading spec lists them; vLLM adds the labels of the model and the engine."""
    return {
        DECISIONS: OffloadingCounterMetadata(
            documentation="Prompts with blocks on a tier, by what was done with them (load, compute) and why.",
            labelnames=_CHOICE,
        ),
        BLOCKS: OffloadingCounterMetadata(
            documentation="Blocks found on a tier, by what was done with them (load, compute) and why.",
            labelnames=_CHOICE,
        ),
        BREAK_EVEN: OffloadingGaugeMetadata(
            documentation="Prompt length from which on loading from the tier is believed to win; 0 for never.",
            labelnames=("tier",),
        ),
        LATENCY: OffloadingGaugeMetadata(
            documentation="Fixed part of a load from the tier, as measured.", labelnames=("tier",)
        ),
        SPEED: OffloadingGaugeMetadata(
            documentation="Speed of loads from the tier, as measured.", labelnames=("tier",)
        ),
        TOKEN: OffloadingGaugeMetadata(
            documentation="What one more prompt token adds to a step, attention aside, as measured."
        ),
    }


def count(stats: OffloadingConnectorStats, decision: Decision) -> None:
    """Add a prompt that went on as decided."""
    seen = set()
    for part in decision.parts:
        labels = (str(part.run.tier), "load" if part.load else "compute", str(part.reason))
        stats.increase_counter(BLOCKS, part.run.blocks, labels)
        if labels not in seen:
            seen.add(labels)
            stats.increase_counter(DECISIONS, 1, labels)
