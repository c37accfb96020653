"""What will arrive in some seconds, from what arrived. Pure functions over a history of samples.

Several simple methods are tried on the history itself: each says what it would have expected at every earlier moment,
and the one that was off by least is asked for the future. How far it was off is how far it is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_pd.planner.capacity import Demand
from vllm_pd.planner.memory import Sample

_FIRST = 6
"""Samples before the first expectation that is judged."""
_USUAL_SPREAD, _LEAST_SPREAD, _MOST_SPREAD = 0.25, 0.05, 0.6
_BELIEF = 8
"""Judged expectations that the usual spread is worth."""
_KEEP = 0.98
"""What a judgement still weighs when the next one was made."""


@dataclass(frozen=True, slots=True)
class Method:
    """Exponential smoothing: how fast the level and its trend follow, and how soon a trend is expected to end."""

    name: str
    level: float
    trend: float = 0.0
    damping: float = 1.0


METHODS = (
    Method("the mean of the last minutes", 0.1),
    Method("the last values", 0.4),
    Method("a slow trend", 0.3, 0.05, 0.98),
    Method("a fast trend", 0.4, 0.15, 0.95),
)


@dataclass(frozen=True, slots=True)
class Forecast:
    """A guess and how good such guesses were."""

    demand: Demand
    spread: float
    """Relative standard deviation."""
    by: str
    """The method, for an explanation."""


def forecast(history: Sequence[Sample], ahead_s: float) -> Forecast:
    """The demand in so many seconds; nothing with the usual spread where nothing was seen."""
    if not history:
        return Forecast(Demand(), _USUAL_SPREAD, "nothing was seen yet")
    each = max(sum(sample.seconds for sample in history) / len(history), 1e-3)
    steps = max(0.0, ahead_s / each)
    found: list[Guess] = [best_guess([get(sample) for sample in history], steps) for get in _SERIES]
    arrivals, prompt, uncached, output = (guess.value for guess in found)
    leading = max(found[0], found[2], found[3], key=lambda guess: guess.spread)
    return Forecast(Demand(arrivals, prompt, max(0.0, min(uncached, prompt)), output), leading.spread, found[0].by)


_SERIES: tuple[Callable[[Sample], float], ...] = (
    lambda sample: sample.arrivals,
    lambda sample: sample.prompt_tokens,
    lambda sample: sample.uncached_tokens,
    lambda sample: sample.output_tokens,
)


@dataclass(frozen=True, slots=True)
class Guess:
    """Of one number."""

    value: float
    spread: float
    by: str


def best_guess(values: Sequence[float], steps: float) -> Guess:
    """What the number will be so many samples after the last, by the method that was off by least so far."""
    best: tuple[float, float, str] | None = None
    for method in METHODS:
        value, off = smoothed(values, steps, method)
        if best is None or off < best[1] * 0.95:
            best = value, off, method.name
    assert best is not None
    value, off, name = best
    scale = sum(values[-_FIRST:]) / len(values[-_FIRST:])
    spread = off / scale if scale > 0 else _USUAL_SPREAD
    return Guess(value, min(_MOST_SPREAD, max(_LEAST_SPREAD, spread)), name)


def smoothed(values: Sequence[float], steps: float, method: Method) -> tuple[float, float]:
    """What the method expects so many samples after the last, and by how much it was off before (root mean square;
    drawn towards the usual where it has been judged seldom)."""
    reach = steps if method.damping >= 1 else method.damping * (1 - method.damping**steps) / (1 - method.damping)
    ahead = max(1, round(steps))
    level, trend = values[0], 0.0
    said: list[float] = []
    squares = weight = 0.0
    for index, value in enumerate(values):
        if index:
            before = level
            level = method.level * value + (1 - method.level) * (level + method.damping * trend)
            trend = method.trend * (level - before) + (1 - method.trend) * method.damping * trend
        said.append(max(0.0, level + trend * reach))
        if index >= ahead + _FIRST:
            squares = _KEEP * squares + (value - said[index - ahead]) ** 2
            weight = _KEEP * weight + 1
    scale = sum(values[-_FIRST:]) / len(values[-_FIRST:])
    usual = _BELIEF * (_USUAL_SPREAD * scale) ** 2
    return said[-1], math.sqrt((squares + usual) / (weight + _BELIEF))
