"""One step of a planner: what is seen and remembered in, a plan and what to remember out. No I/O and no clock."""

from __future__ import annotations

import math
from dataclasses import replace

from vllm_pd.planner.changes import moves, remember
from vllm_pd.planner.config import PlannerConfig, Rule
from vllm_pd.planner.dynamo_rule import by_load
from vllm_pd.planner.learn import learn
from vllm_pd.planner.memory import Memory
from vllm_pd.planner.model import Action, Plan, PoolView
from vllm_pd.planner.sight import Sight, look
from vllm_pd.planner.sla_rule import Foresee, by_targets, expected
from vllm_pd.state.base import Role

_ENOUGH_SAMPLES = 3
"""Spans of time of which a planner must know what arrived before it judges: one may be anything."""


def step(view: PoolView, memory: Memory, config: PlannerConfig, foresee: Foresee = expected) -> tuple[Plan, Memory]:
    """Decide what to change now. The caller carries it out and keeps the memory for the next step."""
    sight = look(view, memory, config)
    memory = learn(view, sight, config)
    sight = replace(sight, memory=memory)
    if sight.blind:
        return _nothing(view, sight, sight.blind), memory
    unknown = _unknown(view, memory, config)
    if unknown:
        return _without_demand(view, sight, config, unknown)
    if config.rule is Rule.DYNAMO_LOAD:
        decision = by_load(view, sight, config)
    else:
        decision = by_targets(view, sight, config, foresee)
    plan = Plan(
        view.at_s,
        decision.actions,
        sight.give_up,
        decision.verdict,
        (*sight.notes, *decision.reasons),
        {name: value for name, value in decision.numbers.items() if math.isfinite(value)},
    )
    return plan, remember(decision.memory, decision.actions)


def _unknown(view: PoolView, memory: Memory, config: PlannerConfig) -> str:
    """What would have to be known to judge the demand; "" when all of it is."""
    if view.traffic is None or view.traffic.seconds <= 0:
        return "what arrived is not known" + (f" ({view.partial})" if view.partial else "")
    if view.traffic.age_s > config.stale_s:
        return f"what arrived is known only up to {view.traffic.age_s:.0f} s ago"
    if len(memory.history) < _ENOUGH_SAMPLES:
        return f"what arrived is known of {len(memory.history)} spans of time, and judged from {_ENOUGH_SAMPLES} on"
    if config.rule is Rule.SLA and view.rates is None and any(sample.arrivals for sample in memory.history):
        return "how fast a worker is has not been measured yet"
    return ""


def _nothing(view: PoolView, sight: Sight, why: str) -> Plan:
    return Plan(view.at_s, (), sight.give_up, f"Nothing is changed: {why}.", sight.notes)


def _without_demand(view: PoolView, sight: Sight, config: PlannerConfig, unknown: str) -> tuple[Plan, Memory]:
    """The list of workers is known, and that a kind is empty needs no more knowledge to be mended."""
    for role, there, others in (
        (Role.DECODE, sight.decode, sight.prefill),
        (Role.PREFILL, sight.prefill, sight.decode),
    ):
        if not there and not sight.both and len(others) >= 2 and not sight.starting.get(role):
            actions: tuple[Action, ...] = tuple(moves(sight, role, 1, f"there is no {role} worker", config))
            if actions:
                verdict = f"{len(actions)} worker becomes {role}: there is none, although {unknown}."
                plan = Plan(view.at_s, actions, sight.give_up, verdict, sight.notes)
                return plan, remember(sight.memory, actions)
    return _nothing(view, sight, unknown), sight.memory
