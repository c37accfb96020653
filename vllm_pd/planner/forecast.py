"""What will arrive in some seconds, from what arrived. Pure functions over a history of samples.

Several simple methods are tried on the history itself: each says what it would have expected at every earlier moment,
and the one that was off by least is asked for the future. How far it was off is how far it is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_pd.planner.capacity import IRREGULAR, Demand
from vllm_pd.planner.memory import Buckets, Sample
from vllm_pd.planner.seasons import Season, seasons, trusted

_FIRST = 6
"""Samples before the first expectation that is judged."""
_USUAL_SPREAD, _LEAST_SPREAD, _MOST_SPREAD = 0.2, 0.05, 0.6
_BELIEF = 5
"""Judged expectations that the usual spread is worth."""
_KEEP = 0.98
"""What a judgement still weighs when the next one was made."""
_JUDGED_BY = 4
"""Samples whose mean an expectation is compared with: what one sample has more than the next, queues even out."""
_PARTS = 30
"""Samples that must be known as parts of what is usual before a season is gone by."""
_CLEARLY = 0.95
"""A method is preferred to a calmer one that was off by more than it, times this."""


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
    prefill_spread: float
    """Relative standard deviation of the tokens to prefill, and to decode. What chance gives one minute more than
    the next is not in it: queues are planned with that."""
    decode_spread: float
    by: str
    """The method, for an explanation."""
    returns: bool = False
    """Whether all of it was seen to return, and is what is usual then: it can be gone by further than a trend can."""
    held: float | None = None
    """KV tokens of a sequence that is decoded, where what is usual of it then is known."""

    @property
    def spreads(self) -> tuple[float, float]:
        return self.prefill_spread, self.decode_spread


def forecasts(
    history: Sequence[Sample],
    ahead_s: Sequence[float],
    answer_tokens: float = 0.0,
    answer_s: float = 0.0,
    ages: Sequence[Buckets] = (),
    at_s: float = 0.0,
) -> list[Forecast]:
    """The demand in so many seconds, for each; nothing with the usual spread where nothing was seen.

    Args:
        answer_tokens, answer_s: how long a usual answer is, and lasts. Who arrives now is answered for as long, so
            where more arrive than are being answered, there is more to decode soon.
        ages, at_s: what came over days, and when the last sample ended; without them nothing is known to return.
    """
    if not history:
        return [Forecast(Demand(), _USUAL_SPREAD, _USUAL_SPREAD, "nothing was seen yet") for _ in ahead_s]
    each = max(sum(sample.seconds for sample in history) / len(history), 1e-3)
    steps = [max(0.0, seconds / each) for seconds in ahead_s]
    *returning, held_returning = seasons(ages, ahead_s)
    times = _times(history, at_s, ahead_s)
    columns = [[get(sample) for sample in history] for get in _SERIES]
    plain = [best_guesses(values, steps) for values in columns]
    usual = [
        _as_usual(values, steps, times, which, smooth)
        for values, which, smooth in zip(columns, returning, plain, strict=True)
    ]
    held = _as_usual([sample.held for sample in history], steps, times, held_returning)
    found = []
    for index, ahead in enumerate(ahead_s):
        guesses = [each[index] for each in plain]
        # Some of them by what is usual, and others that return as well not, would be requests as there never were.
        known = [
            guess
            for smooth, each, which in zip(guesses, usual, returning, strict=True)
            if (guess := each[index] if which else smooth) is not None
        ]
        returns = any(returning) and len(known) == len(guesses)
        arrivals, prompt, uncached, output = known if returns else guesses
        coming = arrivals.value * answer_tokens
        begun = 1.0 - math.exp(-ahead / answer_s) if answer_s > 0 else 0.0
        decoded = output.value if returns else max(output.value, output.value + (coming - output.value) * begun)
        demand = Demand(arrivals.value, prompt.value, min(uncached.value, prompt.value), decoded)
        count = max(sum(sample.arrivals for sample in history) / len(history) * each * _JUDGED_BY, 1e-9)
        prefill = _without_chance(uncached.spread, IRREGULAR / count)
        decode = max(_LEAST_SPREAD, output.spread)
        sequence = held[index] if returns else None
        size = None if sequence is None else sequence.value
        found.append(Forecast(demand, prefill, decode, uncached.by if returns else arrivals.by, returns, size))
    return found


_SERIES: tuple[Callable[[Sample], float], ...] = (
    lambda sample: sample.arrivals,
    lambda sample: sample.prompt_tokens,
    lambda sample: sample.uncached_tokens,
    lambda sample: sample.output_tokens,
)


@dataclass(frozen=True, slots=True)
class _Times:
    """Of a history and what is expected after it, on the clock that planners share."""

    at_s: float
    ahead_s: Sequence[float]
    middles: Sequence[float]
    """Of the samples."""


def _times(history: Sequence[Sample], at_s: float, ahead_s: Sequence[float]) -> _Times:
    middles, end = [], at_s
    for sample in reversed(history):
        middles.append(end - sample.seconds / 2)
        end -= sample.seconds
    return _Times(at_s, ahead_s, middles[::-1])


def _without_chance(spread: float, variance: float) -> float:
    return max(_LEAST_SPREAD, math.sqrt(max(0.0, spread * spread - variance)))


@dataclass(frozen=True, slots=True)
class Guess:
    """Of one number."""

    value: float
    spread: float
    by: str


def best_guesses(values: Sequence[float], steps: Sequence[float]) -> list[Guess]:
    """What the number will be so many samples after the last, each time by the method that was off by least so far."""
    tried = [(method, smoothed(values, steps, method)) for method in METHODS]
    lately = values[-_FIRST:]
    scale = sum(lately) / len(lately)
    found = []
    for index in range(len(steps)):
        method, results = tried[0]
        value, off = results[index]
        for other, its in tried[1:]:
            # Chance alone makes one method a little better than another; the calmer one comes first.
            if its[index][1] < _CLEARLY * off:
                method, (value, off) = other, its[index]
        spread = off / scale if scale > 0 else _USUAL_SPREAD
        found.append(Guess(value, min(_MOST_SPREAD, spread), method.name))
    return found


def _as_usual(
    values: Sequence[float],
    steps: Sequence[float],
    times: _Times,
    returns: Sequence[Season],
    plain: Sequence[Guess] = (),
) -> list[Guess | None]:
    """The guess of how much of what is usual comes, times what is usual then; None where that is not gone by."""
    parts: dict[float, list[Guess]] = {}
    found: list[Guess | None] = []
    for index, seconds in enumerate(times.ahead_s):
        season = trusted(returns, index, seconds)
        then = season.at(times.at_s + seconds) if season is not None else None
        if season is not None and season.width_s not in parts:
            parts[season.width_s] = _parts_of_usual(values, times.middles, steps, season)
        if season is None or then is None or not parts[season.width_s]:
            found.append(None)
            continue
        part = parts[season.width_s][index]
        if plain and season.width_s > seconds and part.spread > _CLEARLY * plain[index].spread:
            # Buckets that are wider than the distance cannot tell how good it is there; the last samples can.
            found.append(None)
            continue
        by = f"what returns every {_span(season.period_s)}, and of that {part.by}"
        found.append(Guess(part.value * then, part.spread, by))
    return found


def _parts_of_usual(
    values: Sequence[float], middles: Sequence[float], steps: Sequence[float], season: Season
) -> list[Guess]:
    """How much of what is usual will come; nothing where it is not known for long enough what was."""
    parts: list[float] = []
    for value, middle in zip(values, middles, strict=True):
        usually = season.at(middle)
        if usually is None:
            parts.clear()
        else:
            parts.append(value / usually)
    return best_guesses(parts, steps) if len(parts) >= _PARTS else []


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.0f} hours" if seconds >= 10_000 else f"{seconds / 60:.0f} minutes"


def smoothed(values: Sequence[float], steps: Sequence[float], method: Method) -> list[tuple[float, float]]:
    """What the method expects so many samples after the last, and by how much it was off before (root mean square;
    drawn towards the usual where it has been judged seldom)."""
    follow, keep = method.level, 1 - method.level
    steer, damping = method.trend, method.damping
    hold = (1 - steer) * damping
    level, trend = values[0], 0.0
    levels, trends = [level], [trend]
    for value in values[1:]:
        before = level
        level = follow * value + keep * (level + damping * trend)
        trend = steer * (level - before) + hold * trend
        levels.append(level)
        trends.append(trend)
    lately = values[-_FIRST:]
    usual = _BELIEF * (_USUAL_SPREAD * sum(lately) / len(lately)) ** 2
    found = []
    for ahead in steps:
        reach = ahead if damping >= 1 else damping * (1 - damping**ahead) / (1 - damping)
        lag = max(1, round(ahead))
        squares = weight = 0.0
        for index in range(_FIRST, len(values) - lag - _JUDGED_BY + 1):
            came = sum(values[index + lag : index + lag + _JUDGED_BY]) / _JUDGED_BY
            off = came - levels[index] - trends[index] * reach
            squares = _KEEP * squares + off * off
            weight = _KEEP * weight + 1
        found.append((max(0.0, level + trend * reach), math.sqrt((squares + usual) / (weight + _BELIEF))))
    return found
