"""Candidates for tests."""

from __future__ import annotations

from typing import Any

from vllm_pd.block_hash import KEY_BYTES, BlockKey
from vllm_pd.routing.ledger import EngineLedger
from vllm_pd.routing.model import NO_OVERLAP, Ask, Overlap, Rates
from vllm_pd.routing.rates import RateLearner
from vllm_pd.state.base import PoolId, Role, WorkerId
from vllm_pd.state.block_index import Holder

SIMPLE = Rates(
    prefill_base=0.0,
    prefill_token=0.001,
    prefill_square=0.0,
    prefill_context=0.0,
    cpu_block=0.001,
    ssd_block=0.01,
    transfer_base=0.01,
    transfer_block=0.0,
)
"""A millisecond for a token, and no more."""


def engine(
    name: str,
    *,
    role: Role = Role.BOTH,
    pool: str = "p",
    rank: int = 0,
    kv_blocks: int = 1000,
    rates: Rates = SIMPLE,
    **load: Any,
) -> EngineLedger:
    """An idle engine, with some of its attributes set to `load`."""
    made = EngineLedger(Holder(WorkerId(name), rank), PoolId(pool), role, kv_blocks, RateLearner(rates))
    for attribute, value in load.items():
        setattr(made, attribute, value)
    return made


def keys(*numbers: int) -> list[BlockKey]:
    """A prompt of which block i is known by numbers[i]."""
    return [n.to_bytes(KEY_BYTES, "big") for n in numbers]


def send(ledger: EngineLedger, request: str, tokens: int, now: float, held: int = 0, **how: Any) -> float:
    """A prompt of `tokens` in blocks of 10, of which `held` are on the GPU. Returns its turn."""
    return ledger.begin(request, Ask(tokens, 10), Overlap(held) if held else NO_OVERLAP, now, **how)
