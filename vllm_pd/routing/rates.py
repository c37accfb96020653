"""How fast an engine is, learned from how long its requests took."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from statistics import median
from typing import Protocol
from weakref import WeakSet

from vllm_pd.linear_law import LinearLaw
from vllm_pd.routing.model import Rates

_JUDGED_BY = 32
"""Observations of one engine by which it is told from its pool."""
_CLEARLY = 0.25
"""Natural logarithm of the ratio from which on an engine is not like its pool."""


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
        self._prefill = LinearLaw(
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
        self._step = LinearLaw((prior.step_base, prior.step_sequence))
        self._transfer = LinearLaw((prior.transfer_base, prior.transfer_block))
        self._prefill_fitted = self._step_fitted = False

    @property
    def is_learned(self) -> bool:
        """Whether prefilling and decoding were both seen; before, one of them at least is the prior."""
        return self._prefill_fitted and self._step_fitted

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
            self._prefill_fitted = True
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
            self._step_fitted = True
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
