"""The rule `sla`: as many workers of each kind as let the wanted fraction of requests meet both targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vllm_pd.planner import explain
from vllm_pd.planner.capacity import Speed
from vllm_pd.planner.changes import moves, removals, rest_left, rested, starts
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.correct import corrected, reserved
from vllm_pd.planner.decision import Decision
from vllm_pd.planner.forecast import Forecast, forecasts
from vllm_pd.planner.learn import answer_s, speed, start_s
from vllm_pd.planner.memory import Memory, NeedSample
from vllm_pd.planner.model import Action, AddAction, Mode, PoolView
from vllm_pd.planner.sight import Sight
from vllm_pd.planner.target import Need, Outlook, Split, best_split, least_total, make_up, outlook, times
from vllm_pd.state.base import Role

_EASED = 1.15
"""Where nearly nothing meets its targets, a move must make the worse kind's strain so many times less."""
_LOST = 0.5
_LEAST_SURPRISE, _MOST_SURPRISE, _SURPRISED_S = 0.1, 0.5, 1000.0
"""Relative standard deviation of a guess beyond which no workers are started for it: as a start's seconds over these,
within bounds."""
_GO = 4
"""One of so many workers may go within the time for which too many must have been there."""
_SURE = 3
"""Steps for which workers must have been too many before one goes, where what is usual says when they are needed."""
_WORTH_SAYING = 0.005
"""A reserve from which on it is told."""
_WARY = 1.5
"""So many times as much of a surprise is planned for before workers are taken away: what goes takes long to come back,
and chance alone would take some away and start them again."""


Foresee = Callable[[Sequence[float], Memory, float], list[Forecast]]
"""The demand in so many seconds, for each, from what is remembered at a time."""


def expected(ahead_s: Sequence[float], memory: Memory, at_s: float) -> list[Forecast]:
    """By what came so far."""
    return forecasts(memory.history, ahead_s, memory.answer, answer_s(memory), memory.ages, at_s)


def by_targets(view: PoolView, sight: Sight, config: PlannerConfig, foresee: Foresee = expected) -> Decision:
    """Decide what to change now."""
    memory = sight.memory
    present = Split(len(sight.prefill), len(sight.decode))
    either = len(sight.both)
    soon_s = (memory.move_s or config.move_s) + config.interval_s
    late_s = start_s(memory, config) + config.interval_s
    pace = speed(view, memory)
    most = max(config.max_workers, sight.total, 2)
    # Unknown is not nothing: what can be said without the queue is how many are needed at least.
    waiting = float(view.queue.tokens) if view.queue is not None else 0.0
    near, far = foresee((soon_s, late_s), memory, view.at_s)
    soon = outlook(near.demand, near.spreads, pace, config, most, waiting)
    reasons = [*explain.seen(view, config), *explain.able(pace, soon, config)]
    reasons.append(explain.ahead(near, soon_s))
    numbers = explain.numbers(near.demand, soon, pace, sight)
    actions: list[Action] = []
    held_back: list[str] = []
    at_hand = present.total + either
    now = fitted(soon, present, either)
    if view.traffic is not None and not sight.moving:
        memory = corrected(memory, view.traffic, soon, now)
        memory = reserved(
            memory,
            view.traffic,
            config,
            is_enough=soon.worth(now) >= config.attainment * soon.reachable,
            answer_s=answer_s(memory),
        )
        sight = replace(sight, memory=memory)
    enough, rest_s = at_hand, _rest(memory, config)
    if config.mode is Mode.SCALE:
        late = _then(far, memory, pace, config, most)
        reasons.append(explain.ahead(far, late_s))
        if memory.start_s is None and (memory.startup_s or 0.0) > config.start_s:
            reasons.append(explain.startup(start_s(memory, config)))
        if memory.reserve - 1.0 >= _WORTH_SAYING:
            reasons.append(explain.reserve(memory.reserve))
        need = _least(late, config)
        # What may be needed again soon is kept, also where it would not be started yet.
        wary = _then(far, memory, pace, config, most, _WARY)
        kept = max(_least(wary, config).total, _least(soon, config).total)
        if far.returns:
            # Between the moments at which what is done now has an effect, and for as long after them as it must pay.
            others = foresee(((soon_s + late_s) / 2, late_s + config.payback_s), memory, view.at_s)
            if all(other.returns for other in others):
                # What is usual says when they are needed again, so that need not be waited for.
                rest_s = _SURE * config.interval_s
                usual = [_then(other, memory, pace, config, most, _WARY) for other in others]
                kept = max(kept, *(_least(each, config).total for each in usual))
        if view.queue is not None:
            memory = _remember_need(memory, kept, at_hand, config)
            sight = replace(sight, memory=memory)
        reasons.append(explain.need(need, sight.total, config))
        numbers["workers_needed"] = float(need.total)
        numbers["reserve"] = memory.reserve
        lacking = _lacking(sight, late, need, config)
        if lacking:
            actions += _start(sight, lacking, need, config, held_back)
        elif view.queue is None:
            held_back.append("Nobody is taken away: what waits for prefill is not known.")
        elif not sight.starting:
            enough = min(at_hand, max(_enough(memory, rest_s, config, at_hand), config.min_workers))
    if at_hand >= 2:
        wanted = best_split(soon, at_hand)
        reasons.append(explain.splits(now, wanted, either, soon))
        if view.queue is None and wanted.decode > present.decode + either:
            held_back.append("No worker leaves prefill: what waits there is not known.")
        else:
            coming = Counter(sight.starting)
            coming.update({action.role: action.count for action in actions if isinstance(action, AddAction)})
            actions += _move(sight, now, wanted, present, either, soon, coming, config, held_back)
    if enough < at_hand and not actions:
        actions += _remove(sight, present, at_hand, soon, enough, rest_s, config, held_back)
    reasons += held_back
    verdict = explain.verdict(actions, now, soon, sight, held_back)
    return Decision(memory, tuple(actions), verdict, tuple(reasons), numbers)


def _then(
    forecast: Forecast, memory: Memory, pace: Speed, config: PlannerConfig, most: int, surprise: float = 1.0
) -> Outlook:
    """What a total is planned by: with the reserve, so much of a surprise, and sequences as large as they are then."""
    if forecast.held is not None:
        pace = replace(pace, held_tokens=forecast.held)
    spreads = _capped(forecast.spreads, memory, config, surprise)
    return outlook(times(forecast.demand, memory.reserve), spreads, pace, config, most)


def _capped(
    spreads: tuple[float, float], memory: Memory, config: PlannerConfig, times: float = 1.0
) -> tuple[float, float]:
    """A total is not planned for every surprise: moves answer those, and the next step may ask for more. The longer a
    start takes, the less it may."""
    most = min(_MOST_SURPRISE, max(_LEAST_SURPRISE, times * start_s(memory, config) / _SURPRISED_S))
    return min(most, spreads[0]), min(most, spreads[1])


def fitted(soon: Outlook, present: Split, either: int) -> Split:
    """The split as it works: workers that do both turn to what there is more of."""
    if not either:
        return present
    options = [Split(present.prefill + n, present.decode + either - n) for n in range(either + 1)]
    return max(options, key=lambda split: (round(soon.worth(split), 4), -soon.strain(split)))


def _least(outlook: Outlook, config: PlannerConfig) -> Need:
    return least_total(outlook, config, config.min_workers, config.max_workers)


def _remember_need(memory: Memory, workers: int, at_hand: int, config: PlannerConfig) -> Memory:
    kept = _lately(memory, _rest(memory, config))
    since = memory.clock if memory.needs_since is None else memory.needs_since
    return replace(memory, needs=(*kept, NeedSample(memory.clock, workers, at_hand)), needs_since=since)


def _lately(memory: Memory, seconds: float) -> list[NeedSample]:
    return [each for each in memory.needs if each.at >= memory.clock - seconds]


def _stay(memory: Memory, rest_s: float) -> int:
    """How many stay for now, however few would be enough: what is too few shows in what is missed, and that takes
    time."""
    most = max(each.at_hand for each in _lately(memory, rest_s))
    return most - max(1, most // _GO)


def _rest(memory: Memory, config: PlannerConfig) -> float:
    """Seconds that workers must have been too many before one goes: what takes long to come back stays longer."""
    if memory.start_s is None:
        return max(config.remove_after_s, start_s(memory, config))
    return max(config.remove_after_s / 2, memory.start_s)


def _enough(memory: Memory, rest_s: float, config: PlannerConfig, at_hand: int) -> int:
    """The most that was wanted in the last seconds; all that are there for a while after others have changed them."""
    if memory.needs_since is None or memory.clock - memory.needs_since < _rest(memory, config):
        return at_hand
    return max(each.workers for each in _lately(memory, rest_s))


def _lacking(sight: Sight, late: Outlook, need: Need, config: PlannerConfig) -> dict[Role, int]:
    """How many workers are to be started of each kind: what the total lacks, where it is lacking, and what a kind lacks
    into which nobody may move for now, although both together would be enough."""
    missing = need.total - sight.total
    if not sight.prefill and not sight.decode and sight.both:
        return {Role.BOTH: missing} if missing > 0 else {}
    if need.total < 2:
        return {}
    wanted = best_split(late, need.total)
    there = Split(sight.count(Role.PREFILL), sight.count(Role.DECODE))
    short = {Role.PREFILL: wanted.prefill - there.prefill, Role.DECODE: wanted.decode - there.decode}
    takes_s = start_s(sight.memory, config)
    found: dict[Role, int] = {}
    for role, more in sorted(short.items(), key=lambda pair: -pair[1]):
        count = min(more, missing - sum(found.values()))
        left = rest_left(sight.memory, role, config)
        # A slow start is no way round a rest that ends before it.
        if more > 0 and left > 0 and takes_s <= max(config.payback_s, left) and not sight.both:
            count = max(count, make_up(late, there, role, need.worth, more))
        if count > 0:
            found[role] = count
    return found


def _start(
    sight: Sight, lacking: Mapping[Role, int], need: Need, config: PlannerConfig, held_back: list[str]
) -> list[Action]:
    memory = sight.memory
    if memory.clock < memory.no_start_before:
        left = memory.no_start_before - memory.clock
        held_back.append(f"Nothing is started for {left:.0f} s more, because earlier starts failed.")
        return []
    if memory.failed_starts:
        if sight.starting:
            held_back.append("Earlier starts failed: whether the one that is tried comes up is waited for.")
            return []
        lacking = dict.fromkeys(list(lacking)[:1], 1)
    actions: list[Action] = []
    for role, count in lacking.items():
        why = explain.because(need) if need.total > sight.total else explain.unmoved(role)
        actions += starts(sight, role, count, why, config, so_far=actions)
    return actions


def _move(
    sight: Sight,
    now: Split,
    wanted: Split,
    present: Split,
    either: int,
    soon: Outlook,
    coming: Mapping[Role, int],
    config: PlannerConfig,
    held_back: list[str],
) -> list[Action]:
    # What those that do both can make up for is no reason to move one that does not.
    if wanted.prefill > present.prefill + either:
        to, count = Role.PREFILL, wanted.prefill - present.prefill - either
    elif wanted.decode > present.decode + either:
        to, count = Role.DECODE, wanted.decode - present.decode - either
    else:
        return []
    if start_s(sight.memory, config) <= config.payback_s:
        count -= coming.get(to, 0)
    if count <= 0:
        held_back.append(f"Nobody moves: the {to} workers that are coming up are enough.")
        return []
    count = min(count, config.max_changes)
    sign = 1 if to is Role.PREFILL else -1
    after = now.moved(sign * count)
    worth, better = soon.worth(now), soon.worth(after)
    gain = better - worth
    eased = soon.strain(now) / max(soon.strain(after), 1e-9)
    empty = now.prefill == 0 or now.decode == 0
    if not empty and gain < config.worth and not (worth < _LOST and gain >= 0 and eased > _EASED):
        held_back.append(explain.not_worth(now, after, gain, config))
        return []
    lost = Split(now.prefill - count * (sign < 0), now.decode - count * (sign > 0))
    cost = (worth - soon.worth(lost)) * (sight.memory.move_s or config.move_s)
    if not empty and gain * config.payback_s < cost and not worth < _LOST:
        held_back.append(explain.too_dear(now, after, config))
        return []
    if not empty and (wait := rested(sight.memory, to, config)):
        held_back.append(wait)
        return []
    found = moves(sight, to, count, explain.why_move(now, after, worth, better), config)
    if not found:
        held_back.append(explain.nobody(sight, to, config))
    return list(found)


def _remove(
    sight: Sight,
    present: Split,
    at_hand: int,
    soon: Outlook,
    enough: int,
    rest_s: float,
    config: PlannerConfig,
    held_back: list[str],
) -> list[Action]:
    stay = _stay(sight.memory, rest_s)
    if stay >= at_hand:
        held_back.append(explain.gradually(enough, rest_s, _GO))
        return []
    target = max(enough, stay)
    surplus = at_hand - target
    why = f"for {rest_s:.0f} s {enough} workers would have been enough"
    if not present.total:
        return list(removals(sight, Role.BOTH, surplus, why, config))
    if target < 2:
        return []
    wanted = best_split(soon, target)
    over = {Role.PREFILL: present.prefill - wanted.prefill, Role.DECODE: present.decode - wanted.decode}
    for role, more in sorted(over.items(), key=lambda pair: -pair[1]):
        if more > 0:
            found = removals(sight, role, min(more, surplus), why, config)
            if found:
                return list(found)
    held_back.append("None of them can be taken away just now.")
    return []
