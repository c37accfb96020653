"""The planner's rule with what will come in place of a guess: how far any forecast could bring it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from vllm_pd.planner.capacity import Demand
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.forecast import Forecast
from vllm_pd.planner.memory import Memory, Sample
from vllm_pd.planner.model import Plan, PoolView
from vllm_pd.planner.plan import step
from vllm_pd.planner.sla_rule import Foresee
from vllm_pd.sim.planned import PlannedCluster
from vllm_pd.sim.planned_config import PlannedConfig
from vllm_pd.sim.trace import TraceRequest

_BEFORE, _AFTER = 2, 4
"""Samples around a moment whose mean is taken for what comes then: chance is not foreseen, what it varies about is."""
_SPREAD = 0.05


def knowing(config: PlannedConfig, enough: PlannedConfig, trace: Sequence[TraceRequest]) -> PlannedCluster:
    """A cluster of `config` whose planner knows what will come: as it was seen where there were `enough` workers."""
    foresee = _seen(enough, trace)
    planner = _planner(config)
    return PlannedCluster(config, lambda view, memory: step(view, memory, planner, foresee))


def _planner(config: PlannedConfig) -> PlannerConfig:
    assert config.planner is not None
    return config.planner


def _seen(config: PlannedConfig, trace: Sequence[TraceRequest]) -> Foresee:
    """What a planner saw in a run of its own, for another that asks for it before it comes."""
    ends: list[float] = []
    samples: list[Sample] = []
    planner = _planner(config)

    def watched(view: PoolView, memory: Memory) -> tuple[Plan, Memory]:
        plan, memory = step(view, memory, planner)
        if memory.history:
            ends.append(view.at_s)
            samples.append(memory.history[-1])
        return plan, memory

    PlannedCluster(config, watched).simulate_planned(trace)

    def foresee(ahead_s: Sequence[float], memory: Memory, at_s: float) -> list[Forecast]:
        return [_then(samples, bisect_left(ends, at_s + ahead)) for ahead in ahead_s]

    return foresee


def _then(samples: Sequence[Sample], index: int) -> Forecast:
    around = samples[max(0, index - _BEFORE) : index + _AFTER] or samples[-_BEFORE:]

    def mean(of: Callable[[Sample], float]) -> float:
        return sum(map(of, around)) / len(around)

    demand = Demand(
        mean(lambda sample: sample.arrivals),
        mean(lambda sample: sample.prompt_tokens),
        mean(lambda sample: sample.uncached_tokens),
        mean(lambda sample: sample.output_tokens),
    )
    held = mean(lambda sample: sample.held) or None
    return Forecast(demand, _SPREAD, _SPREAD, "it is known", returns=True, held=held)
