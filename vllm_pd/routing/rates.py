"""How fast an engine is, learned from how long its requests took."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol
from weakref import WeakSet

from vllm_pd.routing.model import Rates

_WINDOW = 16
"""Observations kept of each size of work."""
_SIZE_STEP = 4.0
"""Work that takes so many times as long is of another size."""
_REFIT_EVERY = 32
"""Observations between two fits once there are many; the first ones count at once."""
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
_JUDGED_BY = 32
"""Observations of one engine by which it is told from its pool."""
_CLEARLY = 0.25
"""Natural logarithm of the ratio from which on an engine is not like its pool."""


class _Fit:
    """Non-negative coefficients of a linear law, from a window of observations. Errors count relatively."""

    def __init__(self, prior: Sequence[float], own_scale: Sequence[int] = ()) -> None:
        """`own_scale`: the terms that are no slower because the others are."""
        self._prior = tuple(prior)
        self._own_scale = frozenset(own_scale)
        self._seen: defaultdict[int, deque[tuple[tuple[float, ...], float]]] = defaultdict(
            lambda: deque(maxlen=_WINDOW)
        )
        """By size of the work, so that many small ones do not push out the few large ones that tell the most."""
        self._until_refit = 1
        self._fits = 0
        self._parts = [1.0] * len(self._prior)
        self._scale = 1.0

    def observe(self, features: tuple[float, ...], seconds: float) -> tuple[float, ...] | None:
        """Take an observation in; the new coefficients if it was time for a fit."""
        expected = sum(x * p for x, p in zip(features, self._prior, strict=True))
        if seconds <= 0 or expected <= 0:
            return None
        self._seen[int(math.log(expected, _SIZE_STEP))].append((features, seconds))
        self._until_refit -= 1
        if self._until_refit > 0:
            return None
        self._fits += 1
        self._until_refit = min(_REFIT_EVERY, self._fits)
        return self._refit()

    def _refit(self) -> tuple[float, ...]:
        prior = self._prior
        seen = [
            (features, seconds, _KEEP**age)
            for size in self._seen.values()
            for age, (features, seconds) in enumerate(reversed(size))
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


class Follower(Protocol):
    """Somebody who keeps rates at hand and wants to hear of new ones."""

    def rates_changed(self) -> None: ...


class RateLearner:
    """The rates of a pool's usual engine. Starts from a prior; a few observations leave it, a single one does not.

    Every observation must be of time that the engine spent on that work: the caller takes the queue out of it.
    Observations of no or negative time are ignored.
    """

    def __init__(self, prior: Rates | None = None) -> None:
        self._rates = prior = prior or Rates()
        self._followers: WeakSet[Follower] = WeakSet()
        self._prefill = _Fit(
            (
                prior.prefill_base,
                prior.prefill_token,
                prior.prefill_square,
                prior.prefill_context,
                prior.cpu_block,
                prior.ssd_block,
            ),
            own_scale=(0, 4, 5),
        )
        self._step = _Fit((prior.step_base, prior.step_sequence))
        self._transfer = _Fit((prior.transfer_base, prior.transfer_block))

    @property
    def rates(self) -> Rates:
        return self._rates

    @rates.setter
    def rates(self, rates: Rates) -> None:
        self._rates = rates
        for follower in self._followers:
            follower.rates_changed()

    def follow(self, follower: Follower) -> None:
        """Tell it of new rates for as long as it lives."""
        self._followers.add(follower)

    def observe_prefill(self, work: PrefillWork, seconds: float) -> None:
        """`work` took `seconds`."""
        fitted = self._prefill.observe(work, seconds)
        if fitted is not None:
            base, token, square, context, cpu, ssd = fitted
            self.rates = replace(
                self.rates,
                prefill_base=base,
                prefill_token=token,
                prefill_square=square,
                prefill_context=context,
                cpu_block=cpu,
                ssd_block=ssd,
            )

    def observe_step(self, running: float, seconds: float) -> None:
        """Decode steps of about `running` sequences took `seconds` each."""
        fitted = self._step.observe((1.0, float(running)), seconds)
        if fitted is not None:
            self.rates = replace(self.rates, step_base=fitted[0], step_sequence=fitted[1])

    def observe_transfer(self, blocks: int, seconds: float) -> None:
        """Handing over `blocks` took `seconds`."""
        fitted = self._transfer.observe((1.0, float(blocks)), seconds)
        if fitted is not None:
            self.rates = replace(self.rates, transfer_base=fitted[0], transfer_block=fitted[1])


class Speed:
    """One engine's rates: those of its pool, unless it proves to be clearly faster or slower at prefilling.

    Engines that are alike share one `Rates`, so that chance differences between them decide nothing.
    """

    __slots__ = ("_factor", "_pool", "_ratios", "_scaled", "_scaled_from", "_until_judged")

    def __init__(self, pool: RateLearner) -> None:
        self._pool = pool
        self._ratios: deque[float] = deque(maxlen=_JUDGED_BY)
        self._until_judged = _JUDGED_BY
        self._factor = 1.0
        self._scaled = self._scaled_from = pool.rates

    @property
    def rates(self) -> Rates:
        rates = self._pool.rates
        if self._factor == 1.0:
            return rates
        if rates is not self._scaled_from:
            self._scaled, self._scaled_from = _slower(rates, self._factor), rates
        return self._scaled

    def observe_prefill(self, work: PrefillWork, seconds: float) -> None:
        """`work` took `seconds` here."""
        expected = _seconds(self._pool.rates, work)
        if seconds <= 0 or expected <= 0:
            return
        self._ratios.append(seconds / expected)
        if self._factor == 1.0:
            # One that is told apart says nothing about the others.
            self._pool.observe_prefill(work, seconds)
        self._until_judged -= 1
        if self._until_judged <= 0:
            self._until_judged = _JUDGED_BY // 2
            typical = median(self._ratios)
            factor = typical if abs(math.log(typical)) > _CLEARLY else 1.0
            if factor != self._factor:
                self._factor, self._scaled_from = factor, self._pool.rates
                self._scaled = _slower(self._scaled_from, factor)

    def observe_step(self, running: float, seconds: float) -> None:
        """Decode steps of about `running` sequences took `seconds` each."""
        self._pool.observe_step(running, seconds)

    def observe_transfer(self, blocks: int, seconds: float) -> None:
        """Handing over `blocks` to this engine took `seconds`."""
        self._pool.observe_transfer(blocks, seconds)


def _slower(rates: Rates, factor: float) -> Rates:
    return replace(
        rates,
        prefill_base=rates.prefill_base * factor,
        prefill_token=rates.prefill_token * factor,
        prefill_square=rates.prefill_square * factor,
        prefill_context=rates.prefill_context * factor,
    )


PrefillWork = tuple[float, float, float, float, float, float]
"""Sums over requests: 1, new tokens, half their square, new times cached tokens, blocks loaded from CPU, from SSD."""


def _seconds(rates: Rates, work: PrefillWork) -> float:
    requests, new, squares, contexts, cpu, ssd = work
    return (
        requests * rates.prefill_base
        + new * rates.prefill_token
        + squares * rates.prefill_square
        + contexts * rates.prefill_context
        + cpu * rates.cpu_block
        + ssd * rates.ssd_block
    )


def prefill_work(new: int, cached: int, cpu: int = 0, ssd: int = 0) -> PrefillWork:
    """The work of one request."""
    return (1.0, float(new), new * new * 0.5, float(new * cached), float(cpu), float(ssd))


def together(one: PrefillWork, other: PrefillWork) -> PrefillWork:
    """The work of both."""
    a, b, c, d, e, f = one
    u, v, w, x, y, z = other
    return (a + u, b + v, c + w, d + x, e + y, f + z)
