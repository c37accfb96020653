"""How many workers of each kind are wanted: the split that lets most requests meet their targets, and the least total
that is enough. Pure arithmetic.

What will arrive is not one number but a guess with a spread. Each split is judged by the mean over that spread, so of
two splits that do equally well for the guess, the one that can take more of a surprise is the better one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vllm_pd.planner.capacity import Demand, Side, Speed, decode_side, prefill_side
from vllm_pd.planner.config import PlannerConfig

_DEVIATIONS = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)
_WEIGHTS = tuple(math.exp(-z * z / 2) for z in _DEVIATIONS)


@dataclass(frozen=True, slots=True)
class Split:
    """So many workers that prefill and so many that decode."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What any split is worth for one demand."""

    prefill: Side
    """For the guess itself."""
    decode: Side
    sides: tuple[tuple[float, Side, Side], ...]
    """Weight and both sides, over the spread of the guess."""

    def worth(self, split: Split) -> float:
        """Fraction of the requests that is expected to meet both targets."""
        return sum(
            weight * prefill.ok[split.prefill] * decode.ok[split.decode] for weight, prefill, decode in self.sides
        )

    def strain(self, split: Split) -> float:
        """Work over capacity, of the kind that has the more of it; above 1 it piles up."""
        return max(self.prefill.load / max(split.prefill, 1e-9), self.decode.load / max(split.decode, 1e-9))


def outlook(
    demand: Demand, spread: float, speed: Speed, config: PlannerConfig, most: int, backlog_tokens: float = 0.0
) -> Outlook:
    """For up to `most` workers of each kind. `spread` is the relative standard deviation of the guess."""
    total = sum(_WEIGHTS)
    sides = []
    for z, weight in zip(_DEVIATIONS, _WEIGHTS, strict=True):
        scaled = _times(demand, math.exp(spread * z))
        sides.append(
            (
                weight / total,
                prefill_side(scaled, speed, config, most, backlog_tokens),
                decode_side(scaled, speed, config, most),
            )
        )
    middle = sides[len(sides) // 2]
    return Outlook(middle[1], middle[2], tuple(sides))


def best_split(outlook: Outlook, total: int) -> Split:
    """The best of all splits of so many workers (at least 2), at least one of each kind."""
    splits = [Split(prefill, total - prefill) for prefill in range(1, total)]
    return max(splits, key=lambda split: (round(outlook.worth(split), 4), -outlook.strain(split)))


def least_total(outlook: Outlook, config: PlannerConfig, least: int, most: int) -> tuple[int, float]:
    """The least number of workers with which the wanted fraction is met, and what fraction is expected with it.

    Where that fraction cannot be met with `most` either, no worker is asked for that does not bring what it must.
    """
    worths = {total: outlook.worth(best_split(outlook, total)) for total in range(least, most + 1)}
    goal = config.attainment * max(1e-9, _reachable(outlook))
    for total, worth in worths.items():
        if worth >= goal:
            return total, worth
    # Piled-up work is no reason to do nothing: the work must be done, in whatever time.
    busy = min(most, max(least, math.ceil(outlook.prefill.load) + math.ceil(outlook.decode.load)))
    for total in range(busy, most):
        further = max((worths[more] - worths[total]) / (more - total) for more in range(total + 1, most + 1))
        if further < config.worth:
            return total, worths[total]
    return most, worths[most]


def _reachable(outlook: Outlook) -> float:
    """What any number of workers would reach: a prompt alone on a worker may take longer than the target."""
    return sum(weight * prefill.ok_alone * decode.ok_alone for weight, prefill, decode in outlook.sides)


def _times(demand: Demand, factor: float) -> Demand:
    return replace(
        demand,
        arrivals=demand.arrivals * factor,
        prompt_tokens=demand.prompt_tokens * factor,
        uncached_tokens=demand.uncached_tokens * factor,
        output_tokens=demand.output_tokens * factor,
    )
