"""What a planner is to remember of actions that were not carried out as it had decided. Pure."""

from __future__ import annotations

from dataclasses import replace

from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.memory import Memory, Refused
from vllm_pd.planner.metrics import Did
from vllm_pd.planner.model import Action, AddAction, MoveAction, RemoveAction

_LEAST_PAUSE_S = 60.0
"""Until what was refused is asked for again."""


def without(before: Memory, after: Memory) -> Memory:
    """The memory after a step of a planner that only tries out: it has asked for nothing."""
    return replace(
        after,
        asked_moves=before.asked_moves,
        asked_removals=before.asked_removals,
        asked_starts=before.asked_starts,
        moved_at=before.moved_at,
        moved_to=before.moved_to,
    )


def remember_outcome(memory: Memory, action: Action, did: Did, config: PlannerConfig) -> Memory:
    """The memory once it is known what came of an action of the newest step.

    What was begun, and what may have been (`Did.UNKNOWN`), stays asked for: the next looks show what became of it.
    What was refused is not waited for, and not asked for again at once.
    """
    if did not in (Did.REFUSED, Did.IMPOSSIBLE, Did.LOST):
        return memory
    until = memory.clock + max(_LEAST_PAUSE_S, config.cooldown_s)
    match action:
        case MoveAction():
            kept = tuple(each for each in memory.asked_moves if each.worker != action.worker)
            refused = (*memory.refused, Refused(action.worker, until))
            return replace(memory, asked_moves=kept, refused=refused if did is not Did.LOST else memory.refused)
        case AddAction():
            asked = list(memory.asked_starts)
            for index in reversed(range(len(asked))):
                if asked[index].role is action.role and asked[index].count == action.count:
                    del asked[index]
                    break
            pause = memory.no_start_before if did is Did.LOST else max(memory.no_start_before, until)
            return replace(memory, asked_starts=tuple(asked), no_start_before=pause)
        case RemoveAction():
            leaving = tuple(each for each in memory.asked_removals if each.worker != action.worker)
            refused = (*memory.refused, Refused(action.worker, until))
            return replace(memory, asked_removals=leaving, refused=refused if did is not Did.LOST else memory.refused)
