"""What a mock worker has done, for its metrics page."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_pd.router.histogram import Series
from vllm_pd.state.base import MoveState, RoleMove

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_MOVE_S = (0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)


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
    ttft: Series = field(default_factory=lambda: Series(_TTFT_S))
    itl: Series = field(default_factory=lambda: Series(_ITL_S))
    """Between two tokens of an answer."""
    moves: dict[str, int] = field(default_factory=lambda: {str(MoveState.DONE): 0, str(MoveState.UNDONE): 0})
    """Changes of its role by how they ended."""
    move_seconds: Series = field(default_factory=lambda: Series(_MOVE_S))

    def note_move(self, move: RoleMove) -> None:
        """A change of its role has ended."""
        self.moves[str(move.state)] += 1
        self.move_seconds.observe(move.took_ms / 1000)
