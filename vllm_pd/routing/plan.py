"""Placing a request that may be split: who decodes, who prefills, and whether prefilling elsewhere is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from vllm_pd.routing.choose import DEFAULT_AFFINITY, Affinity, TimeToFirst, choose
from vllm_pd.routing.model import Ask, Candidate, Choice, Overlaps
from vllm_pd.routing.policies.base import Policy
from vllm_pd.routing.policies.predicted import Predicted
from vllm_pd.routing.split_policy import Partners, SplitPolicy, Weighed
from vllm_pd.routing.split_rule import DEFAULT_RULE, Disagg, SplitRule

_WEIGHING = Predicted()
"""Whose terms the legs are weighed in where another policy chooses."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request goes. `prefill` is None where it goes whole."""

    decode: Choice
    prefill: Choice | None
    reason: str
    """Why whole or split: `never`, `no prefill worker`, `prefill busy`, `short`, `sooner whole`, `split`."""
    ttft: float
    """Predicted seconds to the first token."""
    weighed: Weighed | None = None
    """Where the rule is `auto` and came to it."""

    @property
    def remote(self) -> bool:
        return self.prefill is not None


def plan(
    policy: Policy,
    ask: Ask,
    decoders: Sequence[Candidate],
    prefillers: Sequence[Candidate],
    overlaps: Overlaps,
    now: float,
    *,
    rule: SplitRule = DEFAULT_RULE,
    temperature: float = 0.0,
    random: Random | None = None,
    affinity: Affinity = DEFAULT_AFFINITY,
    explain: bool = False,
) -> Plan:
    """The decode worker, and with it a prefill worker of its pool that is another worker, or none.

    `prefillers` are those that can hand over; `overlaps` covers both. The other arguments are those of `choose`.
    `predicted` weighs both legs together; the other policies choose the decode worker as for a whole request, then the
    prefill worker. Raises `ValueError` without decoders.
    """
    if not ask.exact:
        overlaps = {}

    def pick(policy: Policy, ask: Ask, candidates: Sequence[Candidate], ttft: TimeToFirst | None = None) -> Choice:
        return choose(
            policy,
            ask,
            candidates,
            overlaps,
            now,
            temperature=temperature,
            random=random,
            affinity=affinity,
            explain=explain,
            ttft=ttft,
        )

    if not prefillers or rule.name is Disagg.NEVER:
        whole = pick(policy, ask, decoders)
        return Plan(whole, None, "never" if prefillers else "no prefill worker", whole.best.ttft)
    elsewhere = replace(ask, session=None) if ask.session is not None else ask
    weighing = policy if isinstance(policy, Predicted) else _WEIGHING
    partners = Partners(prefillers, lambda usable: pick(policy, elsewhere, usable), weighing, ask, overlaps, now, rule)
    split = SplitPolicy(weighing, ask, overlaps, now, rule, partners)
    decode = pick(split if weighing is policy else policy, ask, decoders, split.ttft)
    decoder = decoders[decode.chosen]
    why_whole, weighed = split.judge(decoder)
    partner = partners.of(decoder)
    if why_whole or partner is None:
        return Plan(decode, None, why_whole, decode.best.ttft, weighed)
    return Plan(decode, partner.choice, "split", decode.best.ttft, weighed)
