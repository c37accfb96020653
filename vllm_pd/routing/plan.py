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
    weighing = policy if isinstance(policy, Predicted) else Predicted()
    partners = _Partners(
        prefillers,
        lambda usable: pick(policy, elsewhere, usable),
        lambda candidate: weighing.scores(elsewhere, [candidate], overlaps, now)[0],
    )
    leg = _DecodeLeg(weighing, ask, overlaps, now, rule, partners)
    decode = pick(leg if weighing is policy else policy, ask, decoders, leg.ttft)
    decoder = decoders[decode.chosen]
    partner = partners.of(decoder)
    why_whole = leg.whole(decoder)
    if why_whole or partner is None:
        return Plan(decode, None, why_whole, decode.best.ttft)
    return Plan(decode, partner.choice, "split", decode.best.ttft)


@dataclass(frozen=True, slots=True)
class _Partner:
    """A prefill worker with what going there costs."""

    choice: Choice
    candidate: Candidate
    cost: float
    """In the terms of `predicted`, without the hand-over."""


class _Partners:
    """The prefill worker for each decode worker: the same for all of a pool, but for the one that is itself chosen."""

    def __init__(
        self,
        prefillers: Sequence[Candidate],
        pick: Callable[[Sequence[Candidate]], Choice],
        cost: Callable[[Candidate], float],
    ) -> None:
        self._prefillers = prefillers
        self._pick = pick
        self._cost = cost
        self._found: dict[tuple[PoolId, WorkerId | None], _Partner | None] = {}

    def of_pool(self, pool: PoolId) -> _Partner | None:
        """For all of the pool but that worker itself."""
        return self._among(pool, None)

    def of(self, decoder: Candidate) -> _Partner | None:
        found = self._among(decoder.pool, None)
        if found is not None and found.candidate.holder.worker == decoder.holder.worker:
            return self._among(decoder.pool, decoder.holder.worker)
        return found

    def _among(self, pool: PoolId, without: WorkerId | None) -> _Partner | None:
        key = (pool, without)
        if key in self._found:
            return self._found[key]
        usable = [c for c in self._prefillers if c.pool == pool and c.holder.worker != without]
        partner = None
        if usable:
            choice = self._pick(usable)
            candidate = usable[choice.chosen]
            partner = _Partner(choice, candidate, self._cost(candidate))
        self._found[key] = partner
        return partner


class _DecodeLeg:
    """The policy by which `predicted` chooses the decode worker of a request that may be split."""

    name: ClassVar[str] = Predicted.name

    def __init__(
        self, policy: Predicted, ask: Ask, overlaps: Overlaps, now: float, rule: SplitRule, partners: _Partners
    ) -> None:
        self._policy = policy
        self.patience = policy.patience
        self._ask = ask
        self._overlaps = overlaps
        self._now = now
        self._rule = rule
        self._partners = partners
        self._longest_local = max(ask.block_size - 1, rule.max_local_tokens)
        self._steps = ask.output_tokens or _USUAL_ANSWER

    def whole(self, decoder: Candidate) -> str:
        """Why the request would go whole to this decode worker; empty if it would be split."""
        partner = self._partners.of(decoder)
        if partner is None:
            return "no prefill worker"
        held = overlap_on(decoder, self._ask, self._overlaps).blocks
        if self._ask.tokens - cached_tokens(self._ask, held) <= self._longest_local:
            return "short"
        if self._rule.by_time and self._here(decoder) <= partner.cost + self._transfer(decoder):
            return "sooner whole"
        return ""

    def ttft(self, decoder: Candidate, overlap: Overlap) -> float:
        """Seconds to the first token by way of this decode worker."""
        partner = self._partners.of(decoder)
        if partner is None or self.whole(decoder):
            return predict(decoder, self._ask, overlap, self._now, self.patience).ttft
        return partner.choice.best.ttft + self._transfer(decoder)

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        # What `_here`, `_transfer`, `_answer` and `whole` say, without a call for each of many candidates.
        size, most, blocks = ask.block_size, ask.most_cached, ask.blocks
        shortest, by_time, steps = ask.tokens - self._longest_local, self._rule.by_time, self._steps
        held = overlaps.get
        pool: PoolId | None = None
        usual: _Partner | None = None
        found: list[float] = []
        for decoder in candidates:
            holder = decoder.holder
            if decoder.pool != pool:
                pool = decoder.pool
                usual = self._partners.of_pool(pool)
            partner = usual
            if usual is not None and usual.candidate.holder.worker == holder.worker:
                partner = self._partners.of(decoder)
            overlap, rates = held(holder), decoder.rates
            cached = gpu = 0
            if overlap is not None:
                cached, gpu = min(overlap.blocks, most) * size, overlap.gpu
            if partner is None or cached >= shortest:
                seconds = self._here(decoder)
            else:
                seconds = partner.cost + rates.transfer_base + max(0, blocks - gpu) * rates.transfer_block
                if by_time:
                    seconds = min(seconds, self._here(decoder))
            found.append(seconds + steps * rates.step_sequence * max(decoder.inflight, decoder.decoding))
        return found

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        decoder = candidates[index]
        partner = self._partners.of(decoder)
        answer = {"answer": self._answer(decoder)}
        if partner is None or self.whole(decoder):
            return {**self._policy.parts(index, ask, candidates, overlaps, now), **answer}
        there = self._policy.parts(0, ask, [partner.candidate], overlaps, now)
        return {**there, "transfer": self._transfer(decoder), **answer}

    def _here(self, decoder: Candidate) -> float:
        return self._policy.scores(self._ask, [decoder], self._overlaps, self._now)[0]

    def _transfer(self, decoder: Candidate) -> float:
        held = self._overlaps.get(decoder.holder)
        blocks = self._ask.blocks
        return decoder.rates.transfer(blocks if held is None else max(0, blocks - held.gpu))

    def _answer(self, decoder: Candidate) -> float:
        """By how much later the answer ends because others decode there."""
        return self._steps * decoder.rates.step_sequence * max(decoder.inflight, decoder.decoding)
