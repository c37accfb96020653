"""What a planner learns from what it sees: the demand's history, and how fast the workers really are."""

from __future__ import annotations

from dataclasses import replace

from vllm_pd.planner.capacity import Speed, StepLaw
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.memory import Memory, Sample
from vllm_pd.planner.model import PoolView
from vllm_pd.planner.sight import Sight
from vllm_pd.routing.model import Rates

_KEPT = 240
"""Samples of the history."""


def learn(view: PoolView, sight: Sight, config: PlannerConfig) -> Memory:
    """The memory with what this view adds to it."""
    memory, traffic = sight.memory, view.traffic
    if traffic is None or traffic.age_s > config.stale_s or traffic.seconds <= 0:
        return memory
    seconds = sight.elapsed_s if memory.history else traffic.seconds
    if seconds <= 0:
        return memory
    answer = traffic.mean_output
    if answer is None:
        before = memory.history[-1] if memory.history else None
        answer = before.output_tokens / before.arrivals if before and before.arrivals > 0 else 0.0
    sample = Sample(
        seconds,
        traffic.arrivals / traffic.seconds,
        traffic.prompt_tokens / traffic.seconds,
        traffic.uncached_tokens / traffic.seconds,
        traffic.arrivals / traffic.seconds * answer,
    )
    return replace(memory, history=(*memory.history, sample)[-_KEPT:])


def speed(view: PoolView, memory: Memory) -> Speed:
    """How fast the pool's usual worker is."""
    rates = view.rates or Rates()
    return Speed(rates, StepLaw(rates.step_base, rates.step_sequence), view.kv_tokens)
