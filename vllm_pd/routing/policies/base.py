"""What a policy is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from vllm_pd.routing.model import Ask, Candidate, Overlaps


class Policy(Protocol):
    """Rates candidates. A frozen dataclass whose fields are its weights, so that a request may have its own."""

    name: ClassVar[str]

    @property
    def patience(self) -> float:
        """A request lets those go before it that come later by up to so many times its own work; 0: none."""

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        """One number per candidate, the smallest is best. `overlaps` is empty if `ask.exact` is false."""

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        """The terms of one candidate's score, for people."""
