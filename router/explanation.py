"""A decision in a response header: short enough for any proxy on the way, long enough to see why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm_pd.router.decision import Reason
from vllm_pd.routing.record import DecisionRecord, ScoredRecord

EXPLAIN_HEADER = "x-vllm-pd-explain"
DECISION_HEADER = "x-vllm-pd-decision"
SHOWN = 8
"""Candidates in the header, the best ones; the rest is only counted."""
_MAX_NAME = 80


def decision_header(record: DecisionRecord, prefilled: Mapping[str, str | None] | None = None) -> str:
    """Compact JSON in ASCII; times in milliseconds. `prefilled`: what became of the prefill leg, once that is known.

    Candidates are lists of worker, blocks on GPU, CPU and SSD, milliseconds to the first token, score.
    """
    outcome = record.outcome
    pool = next(pool for pool in record.pools if pool.pool == outcome.pool)
    value: dict[str, Any] = {
        "policy": record.policy,
        "decode": _name(*outcome.decode),
        "prefill": _name(*outcome.prefill) if outcome.prefill is not None and record.reason == Reason.SPLIT else None,
        "reason": record.reason,
        "rule": record.rule.name,
        "choice": outcome.choice,
        "ttft_ms": _ms(outcome.ttft),
        "tokens": pool.ask.tokens,
        "blocks": pool.blocks,
        "unknown": pool.why_unknown or None,
        "index_age_ms": _ms(pool.index_age) if pool.index_age is not None else None,
        "count": len(outcome.decoders),
        "candidates": _best(outcome.decoders),
    }
    if outcome.weighed is not None:
        value["here_ms"], value["there_ms"] = _ms(outcome.weighed.here), _ms(outcome.weighed.there)
    if outcome.prefillers:
        value["prefill_count"] = len(outcome.prefillers)
        value["prefill_candidates"] = _best(outcome.prefillers)
    value |= prefilled or {}
    # Unlike msgspec's, this JSON is ASCII only, as a header must be.
    return json.dumps(value, separators=(",", ":"))


def _best(scored: tuple[ScoredRecord, ...]) -> list[list[Any]]:
    best = sorted(scored, key=lambda each: each.score)[:SHOWN]
    return [
        [
            _name(each.worker, each.rank),
            each.overlap.gpu,
            each.overlap.cpu,
            each.overlap.ssd,
            _ms(each.ttft),
            float(f"{each.score:.6g}"),
        ]
        for each in best
    ]


def _name(worker: str, rank: int) -> str:
    return f"{worker[:_MAX_NAME]}/{rank}" if rank else worker[:_MAX_NAME]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
