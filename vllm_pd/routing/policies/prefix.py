"""`prefix`: the longest overlap, whatever waits there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_pd.routing.model import NO_OVERLAP, Ask, Candidate, Overlaps


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks missing; of equals the one with fewer requests."""

    name: ClassVar[str] = "prefix"
    patience: ClassVar[float] = 0.0

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        blocks, held = ask.blocks, overlaps.get
        found: list[float] = []
        for candidate in candidates:
            load = candidate.running + candidate.waiting
            # Below 1, so that load decides only between equal overlaps.
            found.append(blocks - held(candidate.holder, NO_OVERLAP).blocks + load / (load + 1.0))
        return found

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        candidate = candidates[index]
        return {
            "missing_blocks": ask.blocks - overlaps.get(candidate.holder, NO_OVERLAP).blocks,
            "requests": candidate.running + candidate.waiting,
        }
