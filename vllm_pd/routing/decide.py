"""One request over the one or several pools that serve its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from vllm_pd.routing.model import Ask, Candidate, Overlaps
from vllm_pd.routing.plan import Plan, plan
from vllm_pd.routing.policies.base import Policy
from vllm_pd.routing.split_rule import DEFAULT_RULE, SplitRule
from vllm_pd.state.base import PoolId


@dataclass(frozen=True, slots=True)
class PoolAsk:
    """A request as one pool sees it: other pools may count and hash its prompt in another way."""

    pool: PoolId
    ask: Ask
    decoders: Sequence[Candidate]
    """At least one."""
    prefillers: Sequence[Candidate]
    """Those that can hand over; empty where the request must go whole."""
    overlaps: Overlaps
    blocks: int = 0
    """Whole blocks of the prompt that were looked up."""
    why_unknown: str = ""
    """Why overlap is not known; "" when it is."""
    index_age: float | None = None
    """Seconds since the index was as new as the store; None without an index."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which pool, and the plan in it."""

    pool: int
    plan: Plan


def decide(
    policy: Policy,
    pools: Sequence[PoolAsk],
    now: float,
    *,
    rule: SplitRule = DEFAULT_RULE,
    temperature: float = 0.0,
    random: Random | None = None,
    explain: bool = False,
) -> Decision:
    """The plan with the lowest score of its decode worker; of equals the one picked longest ago.

    Arguments are those of `plan`. Raises `ValueError` without pools.
    """
    plans = [
        plan(
            policy,
            pool.ask,
            pool.decoders,
            pool.prefillers,
            pool.overlaps,
            now,
            rule=rule,
            temperature=temperature,
            random=random,
            explain=explain,
        )
        for pool in pools
    ]
    if len(plans) == 1:
        return Decision(0, plans[0])

    def order(index: int) -> tuple[float, int]:
        choice = plans[index].decode
        return choice.best.score, pools[index].decoders[choice.chosen].last_pick

    best = min(range(len(plans)), key=order)
    return Decision(best, plans[best])
