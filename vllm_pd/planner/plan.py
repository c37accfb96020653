"""One step of a planner: what is seen and remembered in, a plan and what to remember out. No I/O and no clock."""

from __future__ import annotations

import math
from dataclasses import replace

from vllm_pd.planner.changes import moves, remember, removals, starts
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.forecast import expected
from vllm_pd.planner.learn import learn, speed
from vllm_pd.planner.memory import Memory
from vllm_pd.planner.model import Action, Mode, Plan, PoolView
from vllm_pd.planner.sight import Sight, look
from vllm_pd.planner.target import Outlook, Split, best_split, least_total, outlook
from vllm_pd.state.base import Role


def step(view: PoolView, memory: Memory, config: PlannerConfig) -> tuple[Plan, Memory]:
    """Decide what to change now. The caller carries it out and keeps the memory for the next step."""
    sight = look(view, memory, config)
    memory = learn(view, sight, config)
    sight = replace(sight, memory=memory)
    blind = sight.blind or _unknown(view, memory, config)
    if blind:
        plan = Plan(view.at_s, (), sight.give_up, f"Nothing is changed: {blind}.", sight.notes)
        return plan, memory
    soon_s = (memory.move_s or config.move_s) + config.interval_s / 2
    late_s = (memory.start_s or config.start_s) + config.interval_s
    most = max(config.max_workers, sight.total)
    pace = speed(view, memory)
    backlog = float(view.queue.tokens) if view.queue else 0.0
    soon = outlook(expected(memory.history, soon_s), 0.2, pace, config, most, backlog)
    now = Split(sight.count(Role.PREFILL), sight.count(Role.DECODE))
    actions: list[Action] = []
    total = now.total
    if config.mode is Mode.SCALE:
        late = outlook(expected(memory.history, late_s), 0.2, pace, config, most)
        need = max(least_total(each, config, config.min_workers, config.max_workers)[0] for each in (soon, late))
        memory = _enough(memory, need, total)
        if need > total and memory.clock >= memory.no_start_before:
            total = need
        elif memory.enough_since is not None and memory.clock - memory.enough_since >= config.remove_after_s:
            total = max(memory.enough, config.min_workers)
    sight = replace(sight, memory=memory)
    wanted = best_split(soon, total) if total >= 2 else now
    actions = _towards(sight, now, wanted, soon, config)
    verdict = f"{len(actions)} changes." if actions else f"{now} is kept."
    numbers = {"prefill_load": soon.prefill.load, "decode_load": soon.decode.load, "worth": soon.worth(now)}
    return Plan(view.at_s, tuple(actions), sight.give_up, verdict, sight.notes, numbers), remember(memory, actions)


def _unknown(view: PoolView, memory: Memory, config: PlannerConfig) -> str:
    if view.traffic is None:
        return "what arrived is not known"
    if view.traffic.age_s > config.stale_s:
        return f"what arrived is known only up to {view.traffic.age_s:.0f} s ago"
    if not memory.history:
        return "what arrived is not known for any span of time"
    if view.rates is None and view.traffic.arrivals:
        return "how fast a worker is has not been measured yet"
    return ""


def _enough(memory: Memory, need: int, total: int) -> Memory:
    if need >= total:
        return replace(memory, enough_since=None, enough=0)
    if memory.enough_since is None:
        return replace(memory, enough_since=memory.clock, enough=need)
    return replace(memory, enough=max(memory.enough, need))


def _towards(sight: Sight, now: Split, wanted: Split, soon: Outlook, config: PlannerConfig) -> list[Action]:
    more_p, more_d = wanted.prefill - now.prefill, wanted.decode - now.decode
    why = f"{wanted} instead of {now}"
    actions: list[Action] = []
    if more_p * more_d < 0:
        to = Role.PREFILL if more_p > 0 else Role.DECODE
        count = min(abs(more_p), abs(more_d))
        after = Split(now.prefill + (count if more_p > 0 else -count), now.decode + (count if more_d > 0 else -count))
        gain = soon.worth(after) - soon.worth(now)
        eased = soon.strain(now) / max(soon.strain(after), 1e-9)
        back = sight.memory.moved_to not in (None, to)
        rest = config.cooldown_s * (3 if back else 1)
        rested = sight.memory.moved_at is None or sight.memory.clock - sight.memory.moved_at >= rest
        if rested and (gain >= config.worth or (soon.worth(now) < 0.5 and eased > 1.15)):
            actions += moves(sight, to, count, why, config)
        more_p, more_d = more_p - int(math.copysign(count, more_p)), more_d - int(math.copysign(count, more_d))
    for role, more in ((Role.PREFILL, more_p), (Role.DECODE, more_d)):
        if more > 0:
            actions += starts(sight, role, more, why, config)
        elif more < 0 and not actions:
            actions += removals(sight, role, -more, why, config)
    return actions
