"""The load rule of Dynamo's first planner, for comparison: thresholds on what waits for prefill and on decode KV use.

Every adjustment interval the means of its steps are compared. Downs are looked at before ups, one worker of a kind at a
time; nothing is done when the number of workers changed meanwhile, and no decode worker is taken away for some
intervals after one was added. Dynamo has no change of role: there a worker is stopped and another one started. Where
the total is fixed, a worker moves when in the same interval one kind is to have one less and the other one more.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_pd.planner.changes import moves, removals, starts
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.decision import Decision
from vllm_pd.planner.memory import LoadTally, Memory
from vllm_pd.planner.model import Action, AddAction, Mode, PoolView
from vllm_pd.planner.sight import Sight, known_loads
from vllm_pd.state.base import Role


def by_load(view: PoolView, sight: Sight, config: PlannerConfig) -> Decision:
    """Count this step; at the end of an interval, decide."""
    rule, memory = config.dynamo, sight.memory
    seen = _seen(view, sight, config)
    if seen is None:
        why = "Nothing is changed: the prefill queue or the load of the decode workers is not known."
        return Decision(memory, (), why, (), {})
    queue, kv = seen
    tally = _count(memory, queue, kv, (sight.count(Role.PREFILL), sight.count(Role.DECODE)))
    passed = memory.clock - tally.since
    if passed < rule.adjustment_interval_s:
        why = f"Nothing is changed: {passed:.0f} of the {rule.adjustment_interval_s:.0f} s of the interval have passed."
        numbers = {"prefill_queue_requests": queue, "decode_kv_load": kv}
        return Decision(replace(memory, tally=tally), (), why, (), numbers)
    queue, kv = tally.queue_sum / tally.steps, tally.kv_sum / tally.steps
    ahead = tally.queue_last + (tally.queue_last - tally.queue_first) * rule.look_ahead
    numbers = {"prefill_queue_requests": queue, "decode_kv_load": kv, "prefill_queue_ahead_requests": ahead}
    reasons = [
        f"In {passed:.0f} s {queue:.2f} requests waited for prefill on average, {ahead:.2f} if it goes on like this; "
        f"the decode load was {kv:.2f}."
    ]
    fresh = LoadTally(since=memory.clock, grace=max(0, tally.grace - 1))
    if tally.changed:
        why = "Nothing is changed: the number of workers changed within the interval."
        return Decision(replace(memory, tally=fresh), (), why, tuple(reasons), numbers)
    prefill_up = queue > rule.prefill_queue_scale_up and ahead > rule.prefill_queue_scale_up
    decode_down = kv < rule.decode_kv_scale_down
    if decode_down and tally.grace:
        reasons.append(f"No decode worker is taken away for {tally.grace} more intervals.")
        decode_down = False
    actions = _act(
        sight, config, queue < rule.prefill_queue_scale_down, decode_down, prefill_up, kv > rule.decode_kv_scale_up
    )
    if any(isinstance(action, AddAction) and action.role is Role.DECODE for action in actions):
        fresh = replace(fresh, grace=rule.grace_intervals)
    verdict = "; ".join(action.why for action in actions) or "queue and load ask for no change that may be made"
    verdict = f"{len(actions)} changes: {verdict}." if actions else f"Nothing is changed: {verdict}."
    return Decision(replace(memory, tally=fresh), tuple(actions), verdict, tuple(reasons), numbers)


def _act(
    sight: Sight, config: PlannerConfig, prefill_down: bool, decode_down: bool, prefill_up: bool, decode_up: bool
) -> list[Action]:
    few, many = "less waits for prefill than the lower threshold", "more waits for prefill than the upper threshold"
    light, full = "the decode load is under its lower threshold", "the decode load is over its upper threshold"
    if config.mode is Mode.FIXED:
        if prefill_down and decode_up:
            return list(moves(sight, Role.DECODE, 1, f"{few}, and {full}", config))
        if decode_down and prefill_up:
            return list(moves(sight, Role.PREFILL, 1, f"{many}, and {light}", config))
        return []
    actions: list[Action] = []
    total = sight.total
    if prefill_down and total > config.min_workers:
        gone = removals(sight, Role.PREFILL, 1, few, config)
        actions += gone
        total -= len(gone)
    if decode_down and total > config.min_workers:
        gone = removals(sight, Role.DECODE, 1, light, config)
        actions += gone
        total -= len(gone)
    # A removed worker's place is free for another one, as Dynamo's budget of GPUs has it.
    for wanted, role, why in ((prefill_up, Role.PREFILL, many), (decode_up, Role.DECODE, full)):
        if wanted and total < config.max_workers:
            added = starts(sight, role, 1, why, config)
            actions += added
            total += len(added)
    return actions


def _seen(view: PoolView, sight: Sight, config: PlannerConfig) -> tuple[float, float] | None:
    """Requests that wait for prefill, and the mean load of the decode workers."""
    loads = known_loads(sight.decode + sight.both, config)
    if view.queue is None or not loads:
        return None
    weight = config.dynamo.waiting_weight
    kv = sum((worker.kv_usage or 0.0) + weight * (worker.waiting or 0) for worker in loads) / len(loads)
    return float(view.queue.requests), kv


def _count(memory: Memory, queue: float, kv: float, workers: tuple[int, int]) -> LoadTally:
    tally = memory.tally
    if not tally.steps:
        tally = LoadTally(since=tally.since or memory.clock, queue_first=queue, workers=workers, grace=tally.grace)
    return replace(
        tally,
        steps=tally.steps + 1,
        queue_last=queue,
        queue_sum=tally.queue_sum + queue,
        kv_sum=tally.kv_sum + kv,
        changed=tally.changed or tally.workers != workers,
    )
