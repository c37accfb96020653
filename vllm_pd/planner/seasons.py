"""What is usual at a time of day, or of whatever returns, and whether to go by it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_pd.planner.long_history import columns, rhythms
from vllm_pd.planner.memory import Buckets
from vllm_pd.planner.periods import usual

_FLOOR = 0.1
"""Of the mean: what is usual is not taken for less, since what comes is compared with it."""
_BETTER = 0.8
"""What returns is gone by where it was off by less than this part of what smoothing was off by, over a period."""
_LEVEL, _PLAIN = 0.3, (0.1, 0.4)
"""How fast what comes beyond the usual is followed, and what it is compared with."""


@dataclass(frozen=True, slots=True)
class Season:
    """What is usual of one series, in buckets."""

    width_s: float
    period_s: float
    """The longer one where two are in it."""
    first: int
    """Number of the bucket from which on it is known, on the shared clock."""
    usual: tuple[float, ...]
    errors: tuple[tuple[float, float], ...]
    """By how much it was off in the last period, and smoothing alone, at each distance that was asked for."""

    def at(self, at_s: float) -> float | None:
        """What is usual then, between the middles of two buckets; None where that is not known."""
        place = at_s / self.width_s - 0.5 - self.first
        index = math.floor(place)
        if not 0 <= index < len(self.usual) - 1:
            return None
        return self.usual[index] + (place - index) * (self.usual[index + 1] - self.usual[index])


def seasons(ages: Sequence[Buckets], ahead_s: Sequence[float]) -> list[list[Season]]:
    """For each number of a sample: what returns, in the narrowest buckets first."""
    found: list[list[Season]] = [[] for _ in range(5)]
    for buckets in ages:
        if not any(buckets.periods):
            continue
        further = max([1, *(math.ceil(seconds / buckets.width_s) for seconds in ahead_s)]) + 3
        periods = buckets.periods
        own = [_usual(*each, further) for each in zip(rhythms(buckets), periods, strict=True)]
        for index, values in enumerate(columns(buckets)):
            shape, every = own[index], periods[index]
            if 0 < index < 4:
                # Tokens: how many requests are usual, times what is usual of one.
                shape = [None if a is None or b is None else a * b for a, b in zip(own[0], shape, strict=True)]
                every = max(every, periods[0])
            if every:
                found[index].append(_season(buckets, values, shape, every, ahead_s))
    return found


def _usual(values: Sequence[float], every: int, further: int) -> list[float | None]:
    return usual(values, every, further) if every else [1.0] * (len(values) + further)


def _season(
    buckets: Buckets, values: Sequence[float], shape: Sequence[float | None], every: int, ahead_s: Sequence[float]
) -> Season:
    known = [each for each in shape if each is not None]
    least = max(_FLOOR * math.fsum(known) / len(known), 1e-9)
    known = [max(least, each) for each in known]
    before = len(shape) - len(known)
    lately = values[before:]
    errors = tuple(_off(lately, known, every, max(1, round(seconds / buckets.width_s))) for seconds in ahead_s)
    first = buckets.index - len(values) + before
    return Season(buckets.width_s, every * buckets.width_s, first, tuple(known), errors)


def _off(values: Sequence[float], shape: Sequence[float], every: int, lag: int) -> tuple[float, float]:
    """Root mean squares over the last period, of the usual as it was exceeded lately, and of smoothing."""
    begin = max(1, len(values) - every)
    if lag >= every or len(values) - begin <= lag:
        return math.inf, 0.0
    beyond = _followed([value / usually for value, usually in zip(values, shape, strict=False)], _LEVEL)
    returns = [beyond[index - lag] * shape[index] - values[index] for index in range(begin + lag, len(values))]
    plain = [
        math.fsum((level[index - lag] - values[index]) ** 2 for index in range(begin + lag, len(values)))
        for level in (_followed(values, follow) for follow in _PLAIN)
    ]
    count = len(returns)
    return math.sqrt(math.fsum(off * off for off in returns) / count), math.sqrt(min(plain) / count)


def _followed(values: Sequence[float], follow: float) -> list[float]:
    level = values[0]
    found = []
    for value in values:
        level += follow * (value - level)
        found.append(level)
    return found


def trusted(found: Sequence[Season], which: int, ahead_s: float) -> Season | None:
    """The season to go by at the distance with this number; None where smoothing is as good."""
    for season in found:
        returns, plain = season.errors[which]
        if ahead_s < season.period_s and returns < _BETTER * plain:
            return season
    return None
