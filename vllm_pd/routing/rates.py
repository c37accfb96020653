"""How fast an engine is, learned from how long its requests took."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from vllm_pd.routing.model import Rates

_WINDOW = 64
_REFIT_EVERY = 32
"""Observations between two fits once there are many; the first ones count at once."""
_DOUBT = 2
"""Observations that have to speak against the prior before its scale moves: one outlier is no rate."""
_KEEP = 0.98
"""What an observation still weighs when the next one came."""
_TRUST_IN_SHAPE = 1.0
"""How many observations the prior's proportions between the terms are worth."""
_OUTLIER = 0.3
"""Relative error from which on an observation pulls no harder."""
_PASSES = 2
_SWEEPS = 20
_LEAST_PART, _MOST_PART = 0.02, 50.0
"""Bounds of a term in relation to the prior's proportions: none vanishes, none takes everything."""
_LEAST_SCALE, _MOST_SCALE = 1e-3, 1e4


class _Fit:
    """Non-negative coefficients of a linear law, from a window of observations. Errors count relatively."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = tuple(prior)
        self._seen: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_WINDOW)
        self._until_refit = 1
        self._fits = 0
        self._parts = [1.0] * len(self._prior)

    def observe(self, features: tuple[float, ...], seconds: float) -> tuple[float, ...] | None:
        """Take an observation in; the new coefficients if it was time for a fit."""
        if seconds <= 0:
            return None
        self._seen.append((features, seconds))
        self._until_refit -= 1
        if self._until_refit > 0:
            return None
        self._fits += 1
        self._until_refit = min(_REFIT_EVERY, self._fits)
        return self._refit()

    def _refit(self) -> tuple[float, ...]:
        prior = self._prior
        expected = [sum(x * p for x, p in zip(features, prior, strict=True)) for features, _ in self._seen]
        ratios = [seconds / e for (_, seconds), e in zip(self._seen, expected, strict=True) if e > 0]
        scale = min(_MOST_SCALE, max(_LEAST_SCALE, median(ratios + [1.0] * _DOUBT)))
        rows = [[x * p * scale for x, p in zip(features, prior, strict=True)] for features, _ in self._seen]
        parts = self._parts
        for _ in range(_PASSES):
            self._solve(rows, parts)
        return tuple(part * p * scale for part, p in zip(parts, prior, strict=True))

    def _solve(self, rows: list[list[float]], parts: list[float]) -> None:
        """One pass of reweighted least squares, drawn towards parts of 1, by coordinate descent within the bounds."""
        terms = range(len(parts))
        matrix = [[0.0] * len(parts) for _ in terms]
        right = [0.0] * len(parts)
        weight = 1.0
        for row, (_, seconds) in zip(reversed(rows), reversed(self._seen), strict=True):
            predicted = sum(part * x for part, x in zip(parts, row, strict=True))
            weight *= _KEEP
            if predicted <= 0:
                continue
            error = abs(seconds / predicted - 1)
            w = weight * min(1.0, _OUTLIER / error if error else 1.0) / (predicted * predicted)
            for i in terms:
                if row[i]:
                    wx = w * row[i]
                    right[i] += wx * seconds
                    line = matrix[i]
                    for j in terms:
                        line[j] += wx * row[j]
        for _ in range(_SWEEPS):
            for i in terms:
                line = matrix[i]
                rest = sum(line[j] * parts[j] for j in terms) - line[i] * parts[i]
                best = (right[i] - rest + _TRUST_IN_SHAPE) / (line[i] + _TRUST_IN_SHAPE)
                parts[i] = min(_MOST_PART, max(_LEAST_PART, best))


class RateLearner:
    """The rates of one engine. Starts from a prior; a few observations suffice to leave it, a single one does not.

    Every observation must be of time that the engine spent on that work: the caller takes the queue out of it.
    Observations of no or negative time are ignored.
    """

    def __init__(self, prior: Rates) -> None:
        self.rates = prior
        self._prefill = _Fit(
            (
                prior.prefill_base,
                prior.prefill_token,
                prior.prefill_square,
                prior.prefill_context,
                prior.cpu_block,
                prior.ssd_block,
            )
        )
        self._step = _Fit((prior.step_base, prior.step_sequence))
        self._transfer = _Fit((prior.transfer_base, prior.transfer_block))

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
        fitted = self._step.observe((1.0, running), seconds)
        if fitted is not None:
            self.rates = replace(self.rates, step_base=fitted[0], step_sequence=fitted[1])

    def observe_transfer(self, blocks: int, seconds: float) -> None:
        """Handing over `blocks` took `seconds`."""
        fitted = self._transfer.observe((1.0, float(blocks)), seconds)
        if fitted is not None:
            self.rates = replace(self.rates, transfer_base=fitted[0], transfer_block=fitted[1])


PrefillWork = tuple[float, float, float, float, float, float]
"""Sums over requests: 1, new tokens, half their square, new times cached tokens, blocks loaded from CPU, from SSD."""


def prefill_work(new: int, cached: int, cpu: int = 0, ssd: int = 0) -> PrefillWork:
    """The work of one request."""
    return (1.0, float(new), new * new * 0.5, float(new * cached), float(cpu), float(ssd))


def together(one: PrefillWork, other: PrefillWork) -> PrefillWork:
    """The work of both."""
    a, b, c, d, e, f = one
    u, v, w, x, y, z = other
    return (a + u, b + v, c + w, d + x, e + y, f + z)
