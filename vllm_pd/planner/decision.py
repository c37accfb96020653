"""What a rule comes to."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_pd.planner.memory import Memory
from vllm_pd.planner.model import Action


@dataclass(frozen=True, slots=True)
class Decision:
    """What a rule came to."""

    memory: Memory
    actions: tuple[Action, ...]
    verdict: str
    reasons: tuple[str, ...]
    numbers: dict[str, float]
