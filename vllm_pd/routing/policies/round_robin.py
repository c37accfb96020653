"""`round-robin`: each in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_pd.routing.model import Ask, Candidate, Overlaps


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """All are equal, and of equals the one picked longest ago is taken."""

    name: ClassVar[str] = "round-robin"
    patience: ClassVar[float] = 0.0

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        return [0.0] * len(candidates)

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        return {"last_pick": candidates[index].last_pick}
