"""What a mock worker has done, for its metrics page."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_pd.state.base import MoveState, RoleMove

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_MOVE_S = (0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(slots=True)
class Seconds:
    """A histogram. `bounds` are the upper ones of its buckets, rising; one more bucket holds the rest."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Each upper bound as Prometheus writes it, and how many were not above it."""
        passed = 0
        for bound, count in zip((*(f"{bound:g}" for bound in self.bounds), "+Inf"), self.counts, strict=True):
            passed += count
            yield bound, passed


@dataclass(slots=True)
class Counters:
    """Since the worker's start. Times are seconds that have really passed, however fast its engine is."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    queries: int = 0
    """Prompt tokens looked for in the cache."""
    hits: int = 0
    cpu_hits: int = 0
    ssd_hits: int = 0
    external_hits: int = 0
    """Prompt tokens from lower tiers, and from other workers."""
    ttft: Seconds = field(default_factory=lambda: Seconds(_TTFT_S))
    itl: Seconds = field(default_factory=lambda: Seconds(_ITL_S))
    """Between two tokens of an answer."""
    moves: dict[str, int] = field(default_factory=lambda: {str(MoveState.DONE): 0, str(MoveState.UNDONE): 0})
    """Changes of its role by how they ended."""
    move_seconds: Seconds = field(default_factory=lambda: Seconds(_MOVE_S))

    def note_move(self, move: RoleMove) -> None:
        """A change of its role has ended."""
        self.moves[str(move.state)] += 1
        self.move_seconds.add(move.took_ms / 1000)
