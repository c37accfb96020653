"""`dynamo-v0.1`: the logit of Dynamo's first router, for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_pd.routing.model import NO_OVERLAP, Ask, Candidate, Overlaps


@dataclass(frozen=True, slots=True)
class DynamoV01:
    """Maximises 2 * share of the prompt held - cache use - waiting / most waiting anywhere; the score is its negative.

    As there, what this router sent since a report counts as waiting and as cache in use until the next one.
    """

    name: ClassVar[str] = "dynamo-v0.1"
    patience: ClassVar[float] = 0.0
    overlap_weight: float = 2.0

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        most = max(candidate.waiting + candidate.begun for candidate in candidates)
        return [-sum(self._terms(candidate, ask, overlaps, most)) for candidate in candidates]

    def _terms(self, candidate: Candidate, ask: Ask, overlaps: Overlaps, most: int) -> tuple[float, float, float]:
        held = overlaps.get(candidate.holder, NO_OVERLAP).blocks * ask.block_size / max(1, ask.tokens)
        usage = candidate.kv_usage
        if candidate.kv_blocks:
            usage += candidate.begun_blocks / candidate.kv_blocks
        waiting = (candidate.waiting + candidate.begun) / most if most else 0.0
        return self.overlap_weight * held, -usage, -waiting

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        most = max(candidate.waiting + candidate.begun for candidate in candidates)
        overlap, usage, waiting = self._terms(candidates[index], ask, overlaps, most)
        return {"overlap": overlap, "usage": usage, "waiting": waiting}
