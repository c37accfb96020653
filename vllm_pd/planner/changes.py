"""From what is wanted to what is done now: which workers change, no more than may at once, and what holds them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.memory import AskedMove, AskedRemoval, AskedStart, Memory
from vllm_pd.planner.model import Action, AddAction, MoveAction, RemoveAction, WorkerView
from vllm_pd.planner.sight import Sight, known_loads
from vllm_pd.state.base import Role

_BACK, _MOST_TURNS = 3.0, 5.0
"""Cooldowns after which a worker may move the other way than the last one did; twice as many for every such turn
lately, up to so many. Two splits that are both wrong would be changed to and fro without end."""
_TURN_FORGOTTEN_S = 600.0
"""After that time a turn counts half."""


def movable(sight: Sight, role: Role, config: PlannerConfig) -> list[WorkerView]:
    """Workers of a role that may be asked to change it, the one with the least to finish first."""
    refused = {each.worker for each in sight.memory.refused}
    workers = sight.prefill if role is Role.PREFILL else sight.decode if role is Role.DECODE else sight.both
    free = [
        worker
        for worker in known_loads(workers, config)
        if worker.is_settled and not worker.is_held and worker.id not in sight.moving and worker.id not in refused
    ]
    return sorted(free, key=lambda worker: ((worker.running or 0) + (worker.waiting or 0), worker.kv_usage, worker.id))


def spare(sight: Sight, role: Role) -> int:
    """Workers that can be taken from a kind before the last that is at work there: those to come do not count."""
    workers = sight.prefill if role is Role.PREFILL else sight.decode
    at_work = sum(worker.is_settled and worker.id not in sight.moving for worker in workers)
    return max(0, at_work - (0 if sight.both else 1))


def moves(sight: Sight, to: Role, count: int, why: str, config: PlannerConfig) -> list[MoveAction]:
    """At most `count` moves into this role from the other one."""
    source = Role.DECODE if to is Role.PREFILL else Role.PREFILL
    count = min(count, config.max_changes - len(sight.moving), spare(sight, source))
    chosen = movable(sight, source, config)[: max(0, count)]
    return [MoveAction(worker.id, worker.epoch, to, why) for worker in chosen]


def removals(sight: Sight, role: Role, count: int, why: str, config: PlannerConfig) -> list[RemoveAction]:
    """At most `count` workers of this role to be taken away."""
    left = spare(sight, role) if role is not Role.BOTH else max(0, len(sight.both) - 1)
    count = min(count, config.max_changes - len(sight.moving), left)
    chosen = movable(sight, role, config)[: max(0, count)]
    return [RemoveAction(worker.id, worker.epoch, why) for worker in chosen]


def starts(
    sight: Sight, role: Role, count: int, why: str, config: PlannerConfig, so_far: Sequence[Action] = ()
) -> list[AddAction]:
    """At most so many as a step may ask for and the operator allows."""
    asked = sum(action.count for action in so_far if isinstance(action, AddAction))
    count = min(count, config.max_changes - asked, config.max_workers - sight.total - asked)
    return [AddAction(role, count, why)] if count > 0 else []


def rest_left(memory: Memory, to: Role, config: PlannerConfig) -> float:
    """Seconds for which it is too early for another move into this role; 0 when it is not."""
    if memory.moved_at is None or memory.moved_to is None:
        return 0.0
    rest = config.cooldown_s
    if memory.moved_to is not to:
        rest *= _BACK * 2.0 ** min(_turns(memory), _MOST_TURNS)
    return max(0.0, memory.moved_at + rest - memory.clock)


def rested(memory: Memory, to: Role, config: PlannerConfig) -> str:
    """Why it is too early for another move into this role; "" when it is not."""
    left = rest_left(memory, to, config)
    if left <= 0:
        return ""
    if memory.moved_to is not to:
        return f"A worker became {memory.moved_to} a short while ago, so none goes the other way for {left:.0f} s more."
    return f"What the last move brought is waited for, {left:.0f} s more."


def _turns(memory: Memory) -> float:
    if memory.moved_at is None:
        return memory.turns
    return float(memory.turns * 0.5 ** ((memory.clock - memory.moved_at) / _TURN_FORGOTTEN_S))


def remember(memory: Memory, actions: Sequence[Action]) -> Memory:
    """The memory of a planner that has asked for this."""
    for action in actions:
        match action:
            case MoveAction():
                asked = AskedMove(action.worker, action.epoch, action.to, memory.clock)
                turns = _turns(memory) + (memory.moved_to not in (None, action.to))
                memory = replace(
                    memory,
                    asked_moves=(*memory.asked_moves, asked),
                    moved_at=memory.clock,
                    moved_to=action.to,
                    turns=turns,
                )
            case AddAction():
                start = AskedStart(action.role, action.count, memory.clock)
                memory = replace(memory, asked_starts=(*memory.asked_starts, start))
            case RemoveAction():
                removal = AskedRemoval(action.worker, action.epoch, memory.clock)
                memory = replace(memory, asked_removals=(*memory.asked_removals, removal))
    return memory
