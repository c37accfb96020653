"""Whether a series returns, and what it was like a period before. Pure arithmetic on buckets of equal width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

LEAST = 8
"""Buckets of the shortest period: with fewer its shape is not seen."""
_ALIKE, _DEEP = 0.5, 0.35
"""How alike two stretches must be that a period lies between (their correlation), and by how much less those must have
been that lie between by less: a slow change is alike at every short distance."""
_CHANCE = 3.5
"""So many standard deviations of the correlation of mere chance."""
_FIRST = 0.9
"""Of several distances, the shortest that is nearly as good as the best: twice a period is one as well."""
_FOLLOW = 0.4
"""How fast the usual shape follows what came in the newest period."""


def period(values: Sequence[float]) -> int:
    """After how many values they return, seen at least twice; 0 where they do not."""
    count = len(values)
    if count < 2 * LEAST:
        return 0
    mean = math.fsum(values) / count
    off = smoothed_out([value - mean for value in values])
    squares = [0.0, *accumulate(value * value for value in off)]
    if squares[-1] <= 1e-12 * mean * mean * count:
        return 0
    lowest, before, here = 1.0, 1.0, _alike(off, squares, 1)
    found: list[tuple[int, float]] = []
    for lag in range(1, count // 2 + 1):
        after = _alike(off, squares, lag + 1)
        lowest = min(lowest, here)
        least = max(_ALIKE, _CHANCE / math.sqrt(count - lag))
        if lag >= LEAST and before <= here >= after and here > least and here - lowest > _DEEP:
            found.append((lag, here))
        before, here = here, after
    best = max((alike for _, alike in found), default=0.0)
    return next((lag for lag, alike in found if alike >= _FIRST * best), 0)


def _alike(off: Sequence[float], squares: Sequence[float], lag: int) -> float:
    later, earlier = off[lag:], off[: len(off) - lag]
    size = math.sqrt((squares[-1] - squares[lag]) * squares[len(off) - lag])
    return sum(map(mul, later, earlier)) / size if size > 0 else 0.0


def usual(values: Sequence[float], every: int, further: int) -> list[float | None]:
    """What was to be expected of each value, and of so many after the last, from those one, two, ... periods before;
    None in the first period. Nothing later than that enters."""
    steady = smoothed_out(values)
    found: list[float | None] = [None] * every
    for index in range(every, len(values) + further):
        usually = found[index - every]
        if index - every < len(values):
            came = steady[index - every]
            usually = came if usually is None else usually + _FOLLOW * (came - usually)
        found.append(usually)
    return found


def smoothed_out(values: Sequence[float]) -> list[float]:
    """Each with its two neighbours."""
    if len(values) < 3:
        return list(values)
    middle = [(a + b + c) / 3 for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return [(values[0] + values[1]) / 2, *middle, (values[-2] + values[-1]) / 2]
