"""Placing a request that may be split: who decodes, who prefills, and whether prefilling elsewhere is worth it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

from vllm_pd.routing.choose import DEFAULT_AFFINITY, Affinity, TimeToFirst, choose
from vllm_pd.routing.model import Ask, Candidate, Choice, Overlap, Overlaps
from vllm_pd.routing.policies.base import Policy
from vllm_pd.routing.policies.predicted import Predicted
from vllm_pd.routing.predict import cached_tokens, overlap_on, predict
from vllm_pd.state.base import PoolId, WorkerId

_USUAL_ANSWER = 100
"""Tokens of an answer whose length is unknown: each step is slowed by the sequences that decode beside it."""


@dataclass(frozen=True, slots=True)
class SplitRule:
    """When a decode worker prefills itself although prefill workers exist."""

    max_local_tokens: int = 0
    """It does if at most this many prompt tokens are to be computed there, or less than one block."""
    by_time: bool = False
    """It also does if that is predicted to cost less time, the stall of its decoding sequences included."""


DEFAULT_RULE = SplitRule()


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request goes. `prefill` is None where it goes whole."""

    decode: Choice
    prefill: Choice | None
    reason: str
    """Why whole or split: `no prefill worker`, `short`, `sooner whole`, `split`."""
    ttft: float
    """Predicted seconds to the first token."""

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

    if not prefillers:
        whole = pick(policy, ask, decoders)
        return Plan(whole, None, "no prefill worker", whole.best.ttft)
    elsewhere = replace(ask, session=None)
    partners = _Partners(prefillers, lambda usable: pick(policy, elsewhere, usable))
    ours = policy if isinstance(policy, Predicted) else None
    legs = _DecodeLeg(ours or Predicted(), ask, overlaps, now, rule, partners)
    decode = pick(legs if ours else policy, ask, decoders, legs.ttft)
    decoder = decoders[decode.chosen]
    reason = legs.whole(decoder)
    return Plan(decode, None if reason else partners.of(decoder), reason or "split", decode.best.ttft)


class _Partners:
    """The prefill worker for each decode worker: the same for all of a pool, but for the one that is itself chosen."""

    def __init__(self, prefillers: Sequence[Candidate], pick: Callable[[Sequence[Candidate]], Choice]) -> None:
        self._prefillers = prefillers
        self._pick = pick
        self._found: dict[tuple[PoolId, WorkerId | None], tuple[Choice, Candidate] | None] = {}

    def of(self, decoder: Candidate) -> Choice | None:
        found = self.pair(decoder)
        return found[0] if found is not None else None

    def pair(self, decoder: Candidate) -> tuple[Choice, Candidate] | None:
        """The choice with its candidate."""
        found = self._among(decoder.pool, None)
        if found is not None and found[1].holder.worker == decoder.holder.worker:
            return self._among(decoder.pool, decoder.holder.worker)
        return found

    def _among(self, pool: PoolId, without: WorkerId | None) -> tuple[Choice, Candidate] | None:
        key = (pool, without)
        if key not in self._found:
            usable = [c for c in self._prefillers if c.pool == pool and c.holder.worker != without]
            choice = self._pick(usable) if usable else None
            self._found[key] = (choice, usable[choice.chosen]) if choice is not None else None
        return self._found[key]


class _DecodeLeg:
    """The policy by which `predicted` chooses the decode worker of a request that may be split."""

    name: ClassVar[str] = Predicted.name

    def __init__(
        self, policy: Predicted, ask: Ask, overlaps: Overlaps, now: float, rule: SplitRule, partners: _Partners
    ) -> None:
        self._policy = policy
        self._ask = ask
        self._overlaps = overlaps
        self._now = now
        self._rule = rule
        self._partners = partners

    def whole(self, decoder: Candidate) -> str:
        """Why the request would go whole to this decode worker; empty if it would be split."""
        if self._partners.of(decoder) is None:
            return "no prefill worker"
        held = overlap_on(decoder, self._ask, self._overlaps).blocks
        new = self._ask.tokens - cached_tokens(self._ask, held)
        if new < self._ask.block_size or new <= self._rule.max_local_tokens:
            return "short"
        if self._rule.by_time and sum(self._here(decoder).values()) <= sum(self._split(decoder).values()):
            return "sooner whole"
        return ""

    def ttft(self, decoder: Candidate, overlap: Overlap) -> float:
        """Seconds to the first token by way of this decode worker."""
        pair = self._partners.pair(decoder)
        if pair is None or self.whole(decoder):
            return predict(decoder, self._ask, overlap, self._now).ttft
        return pair[0].best.ttft + self._transfer(decoder)

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        return [sum(self._terms(candidate).values()) for candidate in candidates]

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        return self._terms(candidates[index])

    def _terms(self, decoder: Candidate) -> dict[str, float]:
        terms = self._here(decoder) if self.whole(decoder) else self._split(decoder)
        steps = self._ask.output_tokens or _USUAL_ANSWER
        terms["answer"] = steps * decoder.rates.step_sequence * decoder.inflight
        return terms

    def _here(self, decoder: Candidate) -> dict[str, float]:
        return dict(self._policy.parts(0, self._ask, [decoder], self._overlaps, self._now))

    def _split(self, decoder: Candidate) -> dict[str, float]:
        pair = self._partners.pair(decoder)
        assert pair is not None, "a split needs a prefill worker"
        terms = dict(self._policy.parts(0, self._ask, [pair[1]], self._overlaps, self._now))
        return {**terms, "transfer": self._transfer(decoder)}

    def _transfer(self, decoder: Candidate) -> float:
        held = overlap_on(decoder, self._ask, self._overlaps).gpu
        return decoder.rates.transfer(max(0, self._ask.blocks - held))
