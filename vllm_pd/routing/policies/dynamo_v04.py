"""`dynamo-v0.4`: the cost of Dynamo 0.4 to 0.6, for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_pd.routing.model import NO_OVERLAP, Ask, Candidate, Overlaps


@dataclass(frozen=True, slots=True)
class DynamoV04:
    """`overlap_weight` * blocks to prefill + blocks in use, both as if the request were there. 0: load only."""

    name: ClassVar[str] = "dynamo-v0.4"
    patience: ClassVar[float] = 0.0
    overlap_weight: float = 1.0

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        return [sum(self._terms(candidate, ask, overlaps)) for candidate in candidates]

    def _terms(self, candidate: Candidate, ask: Ask, overlaps: Overlaps) -> tuple[float, float]:
        new = max(0, ask.tokens - overlaps.get(candidate.holder, NO_OVERLAP).blocks * ask.block_size)
        prefill = (candidate.prefill_tokens + new) / ask.block_size
        return self.overlap_weight * prefill, float(candidate.active_blocks + ask.blocks)

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        prefill, decode = self._terms(candidates[index], ask, overlaps)
        return {"prefill_blocks": prefill, "decode_blocks": decode}
