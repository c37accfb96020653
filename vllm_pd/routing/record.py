"""A decision with everything it was made from, so that it can be shown, kept, and made again by any policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from random import Random

import msgspec

from vllm_pd.errors import SettingsError
from vllm_pd.routing import policies
from vllm_pd.routing.decide import Decision, PoolAsk, decide
from vllm_pd.routing.model import NO_OVERLAP, Ask, Candidate, Overlap, Rates, Scored
from vllm_pd.routing.policies.base import Policy
from vllm_pd.routing.split_policy import Weighed
from vllm_pd.routing.split_rule import SplitRule
from vllm_pd.state.base import PoolId, Role, WorkerId
from vllm_pd.state.block_index import Holder

FORMAT = 2


class CandidateRecord(msgspec.Struct, frozen=True):
    """A candidate as it was then. Satisfies `Candidate`."""

    worker: WorkerId
    rank: int
    overlap: Overlap
    promised: int
    """What `promised_after` the overlap was."""
    pool: PoolId
    role: Role
    free_at: float
    least_wait: float
    turns: tuple[tuple[float, float], ...]
    prefill_tokens: int
    running: int
    waiting: int
    decoding: int
    active_blocks: int
    kv_blocks: int
    kv_usage: float
    begun: int
    begun_blocks: int
    inflight: int
    last_pick: int
    rates: Rates

    @property
    def holder(self) -> Holder:
        return Holder(self.worker, self.rank)

    def promised_after(self, held: int, ask: Ask) -> int:
        return self.promised


class PoolRecord(msgspec.Struct, frozen=True):
    """A pool's part of a decision."""

    pool: PoolId
    ask: Ask
    blocks: int
    """Whole blocks of the prompt that were looked up."""
    why_unknown: str
    index_age: float | None
    """Seconds since the index was as new as the store; None without an index."""
    candidates: tuple[CandidateRecord, ...]
    decoders: tuple[int, ...]
    """Those of `candidates`, by index, that might decode the request."""
    prefillers: tuple[int, ...]
    """Those that might prefill it for another worker."""


class ScoredRecord(msgspec.Struct, frozen=True):
    """What the policy thought of a candidate."""

    worker: WorkerId
    rank: int
    overlap: Overlap
    uncached: int
    score: float
    ttft: float
    parts: Mapping[str, float]


class Outcome(msgspec.Struct, frozen=True):
    """What was decided."""

    pool: PoolId
    decode: Holder
    prefill: Holder | None
    whole_or_split: str
    """Why whole or split, see `Plan.reason`."""
    choice: str
    """Why this decode worker, see `Choice.reason`."""
    ttft: float
    decoders: tuple[ScoredRecord, ...]
    prefillers: tuple[ScoredRecord, ...]
    weighed: Weighed | None
    """What the rule `auto` compared on that decode worker."""

    def same_as(self, other: Outcome) -> bool:
        """Whether both send the request to the same engines."""
        return (self.decode, self.prefill) == (other.decode, other.prefill)


class DecisionRecord(msgspec.Struct, frozen=True):
    """Everything that a decision was made from, and what it was. JSON of it is what `vllm-pd explain` reads."""

    format: int
    request: str
    path: str
    model: str | None
    policy: str
    weights: tuple[tuple[str, float], ...]
    temperature: float
    seed: int | None
    """Of the generator that drew, where the temperature is above 0."""
    rule: SplitRule
    forbidden: str
    """Which property of the request forbids a split, or ""."""
    reason: str
    """Why whole, or "split", in the words of the router's metrics."""
    now: float
    """The router's clock, seconds."""
    pools: tuple[PoolRecord, ...]
    outcome: Outcome


def record_of(
    asks: Sequence[PoolAsk],
    decision: Decision,
    *,
    request: str,
    path: str,
    model: str | None,
    policy: Policy,
    temperature: float,
    seed: int | None,
    rule: SplitRule,
    forbidden: str,
    reason: str,
    now: float,
) -> DecisionRecord:
    """The record of a decision that was made with `explain`. Take it before anything is counted for the request."""
    return DecisionRecord(
        FORMAT,
        request,
        path,
        model,
        policy.name,
        tuple((field.name, getattr(policy, field.name)) for field in dataclasses.fields(policy)),  # type: ignore[arg-type]
        temperature,
        seed,
        rule,
        forbidden,
        reason,
        now,
        tuple(map(_pool_record, asks)),
        outcome_of(asks, decision),
    )


def repeat(record: DecisionRecord, policy: Policy | None = None, rule: SplitRule | None = None) -> Outcome:
    """Decide once more from a record, by its own policy and split rule or by others.

    Raises:
        SettingsError: this version does not know the record's policy or its weights.
    """
    asks = [
        PoolAsk(
            pool.pool,
            pool.ask,
            [pool.candidates[index] for index in pool.decoders],
            [pool.candidates[index] for index in pool.prefillers],
            {candidate.holder: candidate.overlap for candidate in pool.candidates if candidate.overlap != NO_OVERLAP},
        )
        for pool in record.pools
    ]
    decision = decide(
        policy or policies.policy(record.policy, record.weights),
        asks,
        record.now,
        rule=rule or record.rule,
        temperature=record.temperature,
        random=Random(record.seed) if record.seed is not None else Random(0),
        explain=True,
    )
    return outcome_of(asks, decision)


def read_record(text: bytes) -> DecisionRecord:
    """A record from its JSON.

    Raises:
        SettingsError: it is none, or of another version.
    """
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.format != FORMAT:
            raise SettingsError(
                f"The record has format {head.format}, this version reads {FORMAT}; use the version that wrote it."
            )
        return msgspec.json.decode(text, type=DecisionRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise SettingsError(
            f"This is no record of a decision ({e}); save the answer of POST /v1/explain in a file and give that."
        ) from None


class _Head(msgspec.Struct):
    format: int = 0


def outcome_of(asks: Sequence[PoolAsk], decision: Decision) -> Outcome:
    """The decision in terms of workers."""
    made = decision.plan
    return Outcome(
        asks[decision.pool].pool,
        made.decode.best.holder,
        made.prefill.best.holder if made.prefill is not None else None,
        made.reason,
        made.decode.reason,
        made.ttft,
        _scored(made.decode.scored),
        _scored(made.prefill.scored) if made.prefill is not None else (),
        made.weighed,
    )


def _scored(scored: Sequence[Scored]) -> tuple[ScoredRecord, ...]:
    return tuple(
        ScoredRecord(*each.holder, each.overlap, each.uncached, each.score, each.ttft, dict(each.parts))
        for each in scored
    )


def _pool_record(ask: PoolAsk) -> PoolRecord:
    candidates = {candidate.holder: candidate for candidate in (*ask.decoders, *ask.prefillers)}
    place = {holder: index for index, holder in enumerate(candidates)}
    return PoolRecord(
        ask.pool,
        # Keys say nothing to people, and a record may be handed on.
        dataclasses.replace(ask.ask, keys=()),
        ask.blocks,
        ask.why_unknown,
        ask.index_age,
        tuple(_candidate_record(candidate, ask) for candidate in candidates.values()),
        tuple(place[candidate.holder] for candidate in ask.decoders),
        tuple(place[candidate.holder] for candidate in ask.prefillers),
    )


def _candidate_record(candidate: Candidate, ask: PoolAsk) -> CandidateRecord:
    overlap = ask.overlaps.get(candidate.holder, NO_OVERLAP)
    promised = candidate.promised_after(overlap.blocks, ask.ask) if ask.ask.exact else 0
    copied = {name: getattr(candidate, name) for name in _COPIED}
    return CandidateRecord(*candidate.holder, overlap, promised, **copied)


_COPIED = CandidateRecord.__struct_fields__[4:]
