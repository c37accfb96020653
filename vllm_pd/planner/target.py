"""How many workers of each kind are wanted: the split that lets most requests meet their targets, and the least total
that is enough. Pure arithmetic.

What will arrive is not one number but a guess with a spread. Each split is judged by the mean over that spread, so of
two splits that do equally well for the guess, the one that can take more of a surprise is the better one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from vllm_pd.planner.capacity import Demand, Side, Speed, decode_side, prefill_side
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.state.base import Role

_DEVIATIONS = (-1.5, -0.75, 0.0, 0.75, 1.5)
_WEIGHTS = tuple(math.exp(-z * z / 2) for z in _DEVIATIONS)


@dataclass(frozen=True, slots=True)
class Split:
    """So many workers that prefill and so many that decode."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def moved(self, to_prefill: int) -> Split:
        """With so many workers moved from decode to prefill; the other way if negative."""
        return Split(self.prefill + to_prefill, self.decode - to_prefill)

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What any split is worth for one guess of the demand."""

    prefill: Side
    """For the guess itself."""
    decode: Side
    sides: tuple[tuple[float, Side, Side], ...]
    """Weight and both sides, over the spread of the guess."""
    reachable: float
    """Fraction that meets both targets with a worker for every request: long prompts may take longer alone."""

    def worth(self, split: Split) -> float:
        """Fraction of the requests that is expected to meet both targets."""
        prefill, decode = max(split.prefill, 0), max(split.decode, 0)
        return sum(weight * left.ok[prefill] * right.ok[decode] for weight, left, right in self.sides)

    def parts(self, split: Split) -> tuple[float, float]:
        """The same for the target of each kind alone: first tokens in time, and tokens after them."""
        prefill, decode = max(split.prefill, 0), max(split.decode, 0)
        return (
            sum(weight * left.ok[prefill] for weight, left, _ in self.sides),
            sum(weight * right.ok[decode] for weight, _, right in self.sides),
        )

    def strain(self, split: Split) -> float:
        """Work over capacity, of the kind that has the more of it; above 1 it piles up."""
        loads = ((self.prefill.load, split.prefill), (self.decode.load, split.decode))
        return max(load / workers if workers > 0 else (load + 1.0) * 1e3 for load, workers in loads)


def outlook(
    demand: Demand,
    spread: tuple[float, float],
    speed: Speed,
    config: PlannerConfig,
    most: int,
    backlog_tokens: float = 0.0,
) -> Outlook:
    """For up to `most` workers of each kind. `spread`: relative standard deviations of the guess, for what is to be
    prefilled and for what is to be decoded; both are off the same way."""
    total = sum(_WEIGHTS)
    sides = []
    for z, weight in zip(_DEVIATIONS, _WEIGHTS, strict=True):
        left = prefill_side(times(demand, math.exp(spread[0] * z)), speed, config, most, backlog_tokens)
        right = decode_side(times(demand, math.exp(spread[1] * z)), speed, config, most)
        sides.append((weight / total, left, right))
    _, left, right = sides[len(sides) // 2]
    reachable = sum(weight * prefill.ok_alone * decode.ok_alone for weight, prefill, decode in sides)
    return Outlook(left, right, tuple(sides), reachable)


def best_split(outlook: Outlook, total: int) -> Split:
    """The best of all splits of so many workers (at least 2), at least one of each kind."""
    splits = [Split(prefill, total - prefill) for prefill in range(1, total)]
    return max(splits, key=lambda split: (round(outlook.worth(split), 4), -outlook.strain(split)))


@dataclass(frozen=True, slots=True)
class Need:
    """The least number of workers that is enough."""

    total: int
    worth: float
    """Fraction of the requests that is expected to meet both targets with it."""
    is_met: bool
    """Whether that is what is wanted; if not, more workers would bring too little, or there may be no more."""


def least_total(outlook: Outlook, config: PlannerConfig, least: int, most: int) -> Need:
    """What is needed, between `least` and `most`.

    Where the wanted fraction cannot be met, no worker is asked for that does not bring what it must: a target that is
    out of reach is no reason for ever more of them. All work must be done all the same, in whatever time.
    """
    totals = range(max(2, least), most + 1)
    if not totals:
        return Need(least, 0.0, True)
    goal = config.attainment * outlook.reachable

    def worth(total: int) -> float:
        return outlook.worth(best_split(outlook, total))

    if (best := worth(most)) >= goal:
        # More workers are never worth less.
        total = totals[bisect_left(totals, goal, hi=len(totals) - 1, key=worth)]
        if total == 2 and least < 2 and outlook.prefill.load + outlook.decode.load < 0.5:
            return Need(1, worth(total), True)
        return Need(total, worth(total), True)
    worths = {total: worth(total) for total in totals[:-1]} | {most: best}
    busy = max(2, least, math.ceil(outlook.prefill.load * 1.1) + math.ceil(outlook.decode.load * 1.1))
    for total in range(min(busy, most), most):
        further = max((worths[more] - worths[total]) / (more - total) for more in range(total + 1, most + 1))
        if further < config.worth:
            return Need(total, worths[total], False)
    return Need(most, worths[most], False)


def make_up(outlook: Outlook, there: Split, role: Role, worth: float, most: int) -> int:
    """How many workers more of this kind, `most` at most, make a split worth as much although the other kind keeps
    those it has."""
    for count in range(most):
        after = (
            Split(there.prefill + count, there.decode)
            if role is Role.PREFILL
            else Split(there.prefill, there.decode + count)
        )
        if outlook.worth(after) >= worth:
            return count
    return most


def times(demand: Demand, factor: float) -> Demand:
    """So many times as much of everything."""
    return Demand(
        demand.arrivals * factor,
        demand.prompt_tokens * factor,
        demand.uncached_tokens * factor,
        demand.output_tokens * factor,
    )
