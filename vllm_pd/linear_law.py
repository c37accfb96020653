"""A linear law of how long work takes, learned online from work that was timed."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from statistics import median

_WINDOW = 16
"""Observations kept of each size of work."""
_SIZE_STEP = 4.0
"""Work that takes so many times as long is of another size."""
_REFIT_EVERY = 32
"""Observations between two fits once there are many, unless told otherwise; the first ones count at once."""
_DOUBT = 2
"""Observations that have to speak against the prior before its scale moves: one outlier is no rate."""
_KEEP = 0.95
"""What an observation still weighs when the next one of its size came."""
_TRUST_IN_SHAPE = 0.2
"""How many observations the prior's proportions between the terms are worth."""
_OUTLIER = 1.5
"""Ratio to the present fit from which on an observation pulls no harder: what is true is reached in a few fits."""
_PASSES, _SETTLED = 3, 8
"""Passes of least squares in each fit until so many fits were made; later one does."""
_LEAST_PART, _MOST_PART = 0.0, 50.0
"""Bounds of a term in relation to the prior's proportions: none is negative, none takes everything."""
_LEAST_SCALE, _MOST_SCALE = 1e-3, 1e4
_FORGOTTEN = 0.05
"""An observation that weighs less for its age is dropped."""


class LinearLaw:
    """Non-negative coefficients of a linear law, from a window of observations. Errors count relatively."""

    def __init__(
        self, prior: Sequence[float], own_scale: Sequence[int] = (), *, refit_every: int = _REFIT_EVERY, keep: float = 1
    ) -> None:
        """`own_scale`: the terms that are no slower because the others are.

        `keep`: what an observation still weighs after each later one of whatever size. Below 1, what was seen of a size
        that does not come any more is forgotten in the end.
        """
        self._prior = tuple(prior)
        self._own_scale = frozenset(own_scale)
        self._refit_every = refit_every
        self._keep = keep
        self._count = 0
        self._seen: defaultdict[int, deque[tuple[tuple[float, ...], float, int]]] = defaultdict(
            lambda: deque(maxlen=_WINDOW)
        )
        """By size of the work, so that many small ones do not push out the few large ones that tell the most. The last
        number is which observation it was."""
        self._until_refit = 1
        self._fits = 0
        self._parts = [1.0] * len(self._prior)
        self._scale = 1.0

    def observe(self, features: tuple[float, ...], seconds: float) -> tuple[float, ...] | None:
        """Take an observation in; the new coefficients if it was time for a fit."""
        expected = sum(x * p for x, p in zip(features, self._prior, strict=True))
        if seconds <= 0 or expected <= 0:
            return None
        self._seen[int(math.log(expected, _SIZE_STEP))].append((features, seconds, self._count))
        self._count += 1
        self._until_refit -= 1
        if self._until_refit > 0:
            return None
        self._fits += 1
        self._until_refit = min(self._refit_every, self._fits)
        return self._refit()

    def fit(self, observed: Iterable[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
        """Take many observations in, oldest first, and fit once. Those of no or negative time are ignored."""
        for features, seconds in observed:
            self._until_refit = 2
            self.observe(features, seconds)
        self._fits += 1
        self._until_refit = min(self._refit_every, self._fits)
        return self._refit()

    def _forget(self) -> None:
        for size in list(self._seen):
            window = self._seen[size]
            while window and self._keep ** (self._count - window[0][2]) < _FORGOTTEN:
                window.popleft()
            if not window:
                del self._seen[size]

    def _refit(self) -> tuple[float, ...]:
        prior = self._prior
        if self._keep < 1:
            self._forget()
        seen = [
            (features, seconds, _KEEP**age * self._keep ** (self._count - number))
            for size in self._seen.values()
            for age, (features, seconds, number) in enumerate(reversed(size))
        ]
        ratios = [seconds / sum(x * p for x, p in zip(features, prior, strict=True)) for features, seconds, _ in seen]
        scale = min(_MOST_SCALE, max(_LEAST_SCALE, median(ratios + [1.0] * _DOUBT)))
        passes = _PASSES if self._fits < _SETTLED else 1
        if 0.5 < scale / self._scale < 2:
            # The parts are relative to the scale.
            self._parts = [part * self._scale / scale for part in self._parts]
        else:
            self._parts = [1.0 / scale if i in self._own_scale else 1.0 for i in range(len(prior))]
            passes = _PASSES
        self._scale = scale
        rows = [
            ([x * p * scale for x, p in zip(features, prior, strict=True)], seconds, weight)
            for features, seconds, weight in seen
        ]
        for _ in range(passes):
            self._parts = self._solve(rows)
        return tuple(part * p * scale for part, p in zip(self._parts, prior, strict=True))

    def _solve(self, rows: list[tuple[list[float], float, float]]) -> list[float]:
        """One pass of least squares with outliers drawn in, itself drawn towards the prior, within the bounds."""
        terms = range(len(self._parts))
        matrix = [[0.0] * len(terms) for _ in terms]
        usual = [1.0 / self._scale if i in self._own_scale else 1.0 for i in terms]
        right = [_TRUST_IN_SHAPE * part for part in usual]
        for row, seconds, weight in rows:
            predicted = sum(part * x for part, x in zip(self._parts, row, strict=True))
            if predicted <= 0:
                continue
            ratio = min(_OUTLIER, max(1 / _OUTLIER, seconds / predicted))
            w = weight / (predicted * predicted)
            for i in terms:
                if row[i]:
                    wx = w * row[i]
                    right[i] += wx * ratio * predicted
                    line = matrix[i]
                    for j in terms:
                        line[j] += wx * row[j]
        for i in terms:
            matrix[i][i] += _TRUST_IN_SHAPE
        parts = usual
        free = list(terms)
        while free:
            found = _solve_linear(
                [[matrix[i][j] for j in free] for i in free],
                [right[i] - sum(matrix[i][j] * parts[j] for j in terms if j not in free) for i in free],
            )
            parts = list(parts)
            for i, part in zip(free, found, strict=True):
                parts[i] = min(_MOST_PART, max(_LEAST_PART, part))
            # A term at its bound stays there, and the others are fitted to what is left.
            still = [i for i, part in zip(free, found, strict=True) if _LEAST_PART < part < _MOST_PART]
            if len(still) == len(free):
                break
            free = still
        return parts


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of a positive definite system, which needs no pivots. The arguments are used up."""
    size = len(right)
    for k in range(size):
        pivot = matrix[k]
        for i in range(k + 1, size):
            line = matrix[i]
            ratio = line[k] / pivot[k]
            if ratio:
                for j in range(k, size):
                    line[j] -= ratio * pivot[j]
                right[i] -= ratio * right[k]
    for k in reversed(range(size)):
        right[k] = (right[k] - sum(matrix[k][j] * right[j] for j in range(k + 1, size))) / matrix[k][k]
    return right
