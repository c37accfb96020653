"""`llm-d`: the weighted scorers of llm-d's scheduler, for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_pd.routing.model import NO_OVERLAP, Ask, Candidate, Overlaps


@dataclass(frozen=True, slots=True)
class LlmD:
    """Maximises a weighted sum of scorers from 0 to 1; the score is its negative. Weights as in its usual profile.

    Prefix: weighted share of the prompt held. Queue: 1 for the shortest, 0 for the longest. Cache: the free part.
    """

    name: ClassVar[str] = "llm-d"
    patience: ClassVar[float] = 0.0
    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    kv_weight: float = 2.0
    gpu_weight: float = 1.0
    cpu_weight: float = 0.8
    ssd_weight: float = 0.8

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        shortest, longest = _queue_range(candidates)
        return [-sum(self._terms(candidate, ask, overlaps, shortest, longest)) for candidate in candidates]

    def _terms(
        self, candidate: Candidate, ask: Ask, overlaps: Overlaps, shortest: int, longest: int
    ) -> tuple[float, float, float]:
        overlap = overlaps.get(candidate.holder, NO_OVERLAP)
        held = self.gpu_weight * overlap.gpu + self.cpu_weight * overlap.cpu + self.ssd_weight * overlap.ssd
        queue = (longest - candidate.waiting) / (longest - shortest) if longest > shortest else 1.0
        return (
            self.prefix_weight * held / max(1, ask.blocks),
            self.queue_weight * queue,
            self.kv_weight * (1.0 - candidate.kv_usage),
        )

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        prefix, queue, cache = self._terms(candidates[index], ask, overlaps, *_queue_range(candidates))
        return {"prefix": prefix, "queue": queue, "kv_cache": cache}


def _queue_range(candidates: Sequence[Candidate]) -> tuple[int, int]:
    waiting = [candidate.waiting for candidate in candidates]
    return min(waiting), max(waiting)
