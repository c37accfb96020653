"""The two legs of a request that may be split, weighed against computing it whole on its decode worker.

Costs are in the terms of the policy `predicted`: seconds that the request, those behind it and those beside it wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from vllm_pd.routing.dynamo_rules import new_bypass, old_remote
from vllm_pd.routing.model import NO_OVERLAP, Ask, Candidate, Choice, Overlap, Overlaps, Rates
from vllm_pd.routing.policies.predicted import Predicted
from vllm_pd.routing.predict import Prediction, cached_tokens, overlap_on, overtaken, predict, turn
from vllm_pd.routing.split_rule import Disagg, SplitRule
from vllm_pd.state.base import PoolId, WorkerId

_USUAL_ANSWER = 100
"""Tokens of an answer whose length is unknown: each step is slowed by the sequences that decode beside it."""
_OWN_LIMIT = (Disagg.DYNAMO_OLD, Disagg.DYNAMO_NEW)
"""Rules that say themselves what is short."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """What the rule `auto` compared: seconds of waiting, everybody's who has to wait counted."""

    here: float
    """The decode worker prefills itself."""
    there: float
    """The prefill worker does, the hand-over included."""
    transfer: float
    """The hand-over alone."""


@dataclass(frozen=True, slots=True)
class Partner:
    """A prefill worker with what going there costs, without the hand-over."""

    choice: Choice
    candidate: Candidate
    cost: float
    stalling: float
    """The same as the rule `auto` weighs it."""
    late: bool
    """It can not begin in the time that the rule allows."""


class Partners:
    """The prefill worker for each decode worker: the same for all of a pool, but for the one that is itself chosen."""

    def __init__(
        self,
        prefillers: Sequence[Candidate],
        pick: Callable[[Sequence[Candidate]], Choice],
        policy: Predicted,
        ask: Ask,
        overlaps: Overlaps,
        now: float,
        rule: SplitRule,
    ) -> None:
        self._prefillers = prefillers
        self._pick = pick
        self._policy = policy
        self._ask = ask
        self._overlaps = overlaps
        self._now = now
        self._rule = rule
        self._found: dict[tuple[PoolId, WorkerId | None], Partner | None] = {}
        self._waiting: dict[PoolId, int] = {}

    def of_pool(self, pool: PoolId) -> Partner | None:
        """For all of the pool but that worker itself."""
        return self._among(pool, None)

    def of(self, decoder: Candidate) -> Partner | None:
        found = self._among(decoder.pool, None)
        if found is not None and found.candidate.holder.worker == decoder.holder.worker:
            return self._among(decoder.pool, decoder.holder.worker)
        return found

    def waiting(self, pool: PoolId) -> int:
        """Requests that wait for the prefill workers of the pool, without those being computed."""
        found = self._waiting.get(pool)
        if found is None:
            among = [c for c in self._prefillers if c.pool == pool]
            found = self._waiting[pool] = sum(max(c.waiting, c.inflight - 1 - c.decoding, 0) for c in among)
        return found

    def _among(self, pool: PoolId, without: WorkerId | None) -> Partner | None:
        key = (pool, without)
        if key in self._found:
            return self._found[key]
        usable = [c for c in self._prefillers if c.pool == pool and c.holder.worker != without]
        partner = self._partner(usable) if usable else None
        self._found[key] = partner
        return partner

    def _partner(self, usable: Sequence[Candidate]) -> Partner:
        choice = self._pick(usable)
        candidate = usable[choice.chosen]
        policy, ask, rule = self._policy, self._ask, self._rule
        cost = stalling = policy.scores(ask, [candidate], self._overlaps, self._now)[0]
        late, weighs = False, rule.name is Disagg.AUTO and candidate.role.decodes
        bounded = bool(rule.max_wait) and rule.name in (Disagg.AUTO, Disagg.THRESHOLD)
        if bounded or weighs:
            expected = predict(candidate, ask, overlap_on(candidate, ask, self._overlaps), self._now, policy.patience)
            late = bounded and expected.queue > rule.max_wait
            if weighs:
                stalling = total_wait(candidate, expected, policy, rule, self._now)
        return Partner(choice, candidate, cost, stalling, late)


def total_wait(candidate: Candidate, expected: Prediction, policy: Predicted, rule: SplitRule, now: float) -> float:
    """What the rule `auto` thinks of a prompt's computation: as the policy's score, but for the sequences that stand
    still meanwhile. Requests that are on their way there will decode by then."""
    work = expected.load + expected.prefill
    others = rule.stall * max(candidate.inflight, candidate.decoding) if candidate.role.decodes else 0.0
    if candidate.turns:
        others += overtaken(candidate.turns, turn(now, policy.patience, work))[1]
    return expected.queue + work * (1.0 + policy.work + others)


def stall(decoder: Candidate, work: float, policy: Predicted, rule: SplitRule) -> float:
    """By how much `total_wait` is above the policy's score, for this work."""
    return work * (rule.stall * max(decoder.inflight, decoder.decoding) - policy.disturbance * decoder.decoding)


class SplitPolicy:
    """The policy by which `predicted` chooses the decode worker of a request that may be split."""

    name: ClassVar[str] = Predicted.name

    def __init__(
        self, policy: Predicted, ask: Ask, overlaps: Overlaps, now: float, rule: SplitRule, partners: Partners
    ) -> None:
        self._policy = policy
        self.patience = policy.patience
        self._ask = ask
        self._overlaps = overlaps
        self._now = now
        self._rule = rule
        self._partners = partners
        self._longest_local = max(ask.block_size - 1, 0 if rule.name in _OWN_LIMIT else rule.max_local_tokens)
        self._steps = ask.output_tokens or _USUAL_ANSWER
        self._expected: Prediction | None = None
        """For the decode worker that was weighed last."""
        self._judged: tuple[Candidate | None, tuple[str, Weighed | None]] = (None, ("", None))

    def judge(self, decoder: Candidate) -> tuple[str, Weighed | None]:
        """Why the request would go whole to this decode worker, empty if it would be split; and what was weighed."""
        # The chosen one is asked for several times.
        if self._judged[0] is not decoder:
            self._judged = (decoder, self._judge(decoder))
        return self._judged[1]

    def _judge(self, decoder: Candidate) -> tuple[str, Weighed | None]:
        partner = self._partners.of(decoder)
        if partner is None:
            return "no prefill worker", None
        overlap, ask, rule = overlap_on(decoder, self._ask, self._overlaps), self._ask, self._rule
        if ask.tokens - cached_tokens(ask, overlap.blocks) <= self._longest_local:
            return "short", None
        if partner.late:
            return "prefill busy", None
        if rule.name is Disagg.AUTO:
            transfer = self._transfer(decoder)
            expected = self._expected = predict(decoder, ask, overlap, self._now, self.patience)
            here = total_wait(decoder, expected, self._policy, rule, self._now)
            weighed = Weighed(here, partner.stalling + transfer, transfer)
            return "sooner whole" if weighed.here <= weighed.there else "", weighed
        if rule.name is Disagg.DYNAMO_OLD:
            queue = self._partners.waiting(decoder.pool)
            held = min(1.0, overlap.gpu * ask.block_size / ask.tokens)
            if old_remote(ask.tokens, held, queue, max_local=rule.max_local_tokens, max_queue=rule.max_queue):
                return "", None
            return "prefill busy" if queue >= rule.max_queue else "short", None
        if rule.name is Disagg.DYNAMO_NEW:
            busy = bool(rule.prefill_busy) and partner.candidate.prefill_tokens > rule.prefill_busy
            full = bool(rule.decode_busy) and decoder.active_blocks > rule.decode_busy * decoder.kv_blocks > 0
            if new_bypass(
                ask.tokens,
                overlap.gpu,
                ask.block_size,
                prefill_busy=busy,
                decode_busy=full,
                threshold=rule.max_local_tokens,
                ratio=rule.ratio,
            ):
                return "prefill busy" if busy else "short", None
        return "", None

    def ttft(self, decoder: Candidate, overlap: Overlap) -> float:
        """Seconds to the first token by way of this decode worker."""
        partner = self._partners.of(decoder)
        why_whole, weighed = self.judge(decoder)
        if partner is None or why_whole:
            expected = self._expected if weighed is not None else None
            return (expected or predict(decoder, self._ask, overlap, self._now, self.patience)).ttft
        return partner.choice.best.ttft + (weighed.transfer if weighed is not None else self._transfer(decoder))

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        if self._rule.name in _OWN_LIMIT:
            return [self._score(decoder) for decoder in candidates]
        # What `_score` says, without a call for each of many candidates.
        size, most, blocks = ask.block_size, ask.most_cached, ask.blocks
        shortest, steps = ask.tokens - self._longest_local, self._steps
        by_time, weight, own = self._rule.name is Disagg.AUTO, self._rule.stall, 1.0 + self._policy.work
        held = overlaps.get
        pool: PoolId | None = None
        usual: Partner | None = None
        rates: Rates | None = None
        transfer = step = nothing_cached = 0.0
        found: list[float] = []
        # Those that would prefill themselves, or might, and what doing it elsewhere costs as the rule `auto` sees it.
        # What doing it here costs is asked for all of them at once.
        here: list[int] = []
        limits: list[float] = []
        for decoder in candidates:
            holder = decoder.holder
            if decoder.pool != pool:
                pool = decoder.pool
                usual = self._partners.of_pool(pool)
            partner = usual
            if usual is not None and usual.candidate.holder.worker == holder.worker:
                partner = self._partners.of(decoder)
            if decoder.rates is not rates:
                # Mostly one object for all of a pool.
                rates = decoder.rates
                transfer, step = rates.transfer(blocks), rates.step_sequence * steps
                nothing_cached = rates.prefill(ask.tokens, 0)
            stalls, decoding = decoder.inflight, decoder.decoding
            if decoding > stalls:
                stalls = decoding
            overlap, cached, over = held(holder), 0, transfer
            if overlap is not None:
                cached = min(overlap.blocks, most) * size
                over = rates.transfer(max(0, blocks - overlap.gpu))
            if partner is None or partner.late or cached >= shortest:
                here.append(len(found))
                limits.append(inf)
                found.append(step * stalls)
                continue
            if by_time:
                there = partner.stalling + over
                # The least that it can cost here, with no queue before it.
                if overlap is not None or decoder.promised or nothing_cached * (own + weight * stalls) <= there:
                    here.append(len(found))
                    limits.append(there)
            found.append(partner.cost + over + step * stalls)
        if here:
            self._prefer_here(found, here, limits, candidates)
        return found

    def _prefer_here(
        self, found: list[float], here: Sequence[int], limits: Sequence[float], candidates: Sequence[Candidate]
    ) -> None:
        """Put in the scores of those, by index, that prefill themselves: whoever costs no more so than its limit."""
        decoders = [candidates[index] for index in here]
        costs = self._policy.scores(self._ask, decoders, self._overlaps, self._now)
        for index, decoder, cost, limit in zip(here, decoders, costs, limits, strict=True):
            if cost > limit:
                continue
            stalls = max(decoder.inflight, decoder.decoding)
            if stalls and limit < inf and cost + stall(decoder, self._work(decoder), self._policy, self._rule) > limit:
                continue
            found[index] = cost + decoder.rates.step_sequence * self._steps * stalls

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        decoder = candidates[index]
        partner = self._partners.of(decoder)
        answer = {"answer": self._answer(decoder)}
        if partner is None or self.judge(decoder)[0]:
            return {**self._policy.parts(index, ask, candidates, overlaps, now), **answer}
        there = self._policy.parts(0, ask, [partner.candidate], overlaps, now)
        return {**there, "transfer": self._transfer(decoder), **answer}

    def _score(self, decoder: Candidate) -> float:
        partner = self._partners.of(decoder)
        if partner is None or self.judge(decoder)[0]:
            return self._here(decoder) + self._answer(decoder)
        return partner.cost + self._transfer(decoder) + self._answer(decoder)

    def _here(self, decoder: Candidate) -> float:
        return self._policy.scores(self._ask, [decoder], self._overlaps, self._now)[0]

    def _work(self, decoder: Candidate) -> float:
        expected = predict(decoder, self._ask, self._overlaps.get(decoder.holder, NO_OVERLAP), self._now, self.patience)
        return expected.load + expected.prefill

    def _transfer(self, decoder: Candidate) -> float:
        held = self._overlaps.get(decoder.holder)
        blocks = self._ask.blocks
        return decoder.rates.transfer(blocks if held is None else max(0, blocks - held.gpu))

    def _answer(self, decoder: Candidate) -> float:
        """By how much later the answer ends because others decode there."""
        return self._steps * decoder.rates.step_sequence * max(decoder.inflight, decoder.decoding)
