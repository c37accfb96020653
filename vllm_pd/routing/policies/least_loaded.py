"""`least-loaded`: the fewest requests, whatever they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_pd.routing.model import Ask, Candidate, Overlaps


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """Requests running + `waiting_weight` * waiting; of equals the one with less of its cache in use."""

    name: ClassVar[str] = "least-loaded"
    patience: ClassVar[float] = 0.0
    waiting_weight: float = 4.0
    """A waiting request delays the next one by its whole prefill, a running one only shares steps with it."""

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        weight = self.waiting_weight
        # Cache use never reaches the weight of half a request.
        return [c.running + weight * c.waiting + 0.49 * round(c.kv_usage, 2) for c in candidates]

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        candidate = candidates[index]
        return {"running": candidate.running, "waiting": candidate.waiting, "kv_usage": candidate.kv_usage}
