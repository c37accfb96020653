"""`dynamo-v1`: the cost of Dynamo 1.x with a credit per tier that decays with load, for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_pd.routing.model import NO_OVERLAP, Ask, Candidate, Overlaps


@dataclass(frozen=True, slots=True)
class DynamoV1:
    """`prefill_scale` * (queued and own prompt blocks - credit for blocks held) + blocks in use + requests in progress.

    The credit for GPU blocks shrinks where more prefill is queued than at the least busy candidate.
    """

    name: ClassVar[str] = "dynamo-v1"
    patience: ClassVar[float] = 0.0
    gpu_credit: float = 1.0
    cpu_credit: float = 0.75
    ssd_credit: float = 0.25
    credit_decay: float = 0.0
    prefill_scale: float = 1.0
    request_weight: float = 0.0

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        least = min(candidate.prefill_tokens for candidate in candidates)
        return [sum(self._terms(candidate, ask, overlaps, least)) for candidate in candidates]

    def _terms(self, candidate: Candidate, ask: Ask, overlaps: Overlaps, least: int) -> tuple[float, float, float]:
        overlap, size = overlaps.get(candidate.holder, NO_OVERLAP), ask.block_size
        raw = (candidate.prefill_tokens + ask.tokens) / size
        beyond = (candidate.prefill_tokens - least) / size / max(1, ask.blocks)
        decay = 1.0 / (1.0 + self.credit_decay * beyond)
        credit = self.gpu_credit * decay * overlap.gpu + self.cpu_credit * overlap.cpu + self.ssd_credit * overlap.ssd
        return (
            self.prefill_scale * max(raw - credit, 0.0),
            float(candidate.active_blocks + ask.blocks),
            self.request_weight * candidate.inflight,
        )

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        least = min(candidate.prefill_tokens for candidate in candidates)
        prefill, decode, requests = self._terms(candidates[index], ask, overlaps, least)
        return {"prefill_blocks": prefill, "decode_blocks": decode, "requests": requests}
