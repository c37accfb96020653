"""What will arrive in some seconds, from what arrived. Pure functions over a history of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_pd.planner.capacity import Demand
from vllm_pd.planner.memory import Sample

_LEVEL, _TREND, _DAMPING = 0.35, 0.15, 0.9


def expected(history: Sequence[Sample], ahead_s: float) -> Demand:
    """The demand in so many seconds; nothing expected where nothing was seen."""
    if not history:
        return Demand()
    each = max(sum(sample.seconds for sample in history) / len(history), 1e-3)
    steps = ahead_s / each

    def of(get: Callable[[Sample], float]) -> float:
        return holt([get(sample) for sample in history], steps)

    return Demand(
        of(lambda sample: sample.arrivals),
        of(lambda sample: sample.prompt_tokens),
        of(lambda sample: sample.uncached_tokens),
        of(lambda sample: sample.output_tokens),
    )


def holt(values: Sequence[float], steps: float) -> float:
    """Exponential smoothing with a damped trend; never below 0."""
    level, trend = values[0], 0.0
    for value in values[1:]:
        before = level
        level = _LEVEL * value + (1 - _LEVEL) * (level + _DAMPING * trend)
        trend = _TREND * (level - before) + (1 - _TREND) * _DAMPING * trend
    reach: float = _DAMPING * (1 - _DAMPING**steps) / (1 - _DAMPING)
    return max(0.0, level + trend * reach)
