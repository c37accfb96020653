"""The sentences and figures of a plan: what was seen, expected and needed, and what held a change back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_pd.planner.capacity import Demand, Speed
from vllm_pd.planner.changes import movable, spare
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.forecast import Forecast
from vllm_pd.planner.model import Action, AddAction, Latency, MoveAction, PoolView, RemoveAction
from vllm_pd.planner.sight import Sight
from vllm_pd.planner.target import Need, Outlook, Split
from vllm_pd.state.base import Role

_WORTH_SAYING = 0.05
"""A correction of the model from which on it is told."""


def seen(view: PoolView, config: PlannerConfig) -> list[str]:
    """What the last span of time brought."""
    traffic = view.traffic
    if traffic is None:
        return []
    if not traffic.arrivals:
        said = [f"Nothing arrived in the last {traffic.seconds:.0f} s."]
    else:
        said = [
            f"In the last {traffic.seconds:.0f} s {traffic.arrivals / traffic.seconds:.2f} requests a second arrived, "
            f"of {traffic.prompt_tokens / traffic.arrivals:.0f} tokens each, "
            f"{traffic.uncached_tokens / traffic.arrivals:.0f} of them to be computed"
            + (f"; answers had {traffic.mean_output:.0f} tokens." if traffic.mean_output is not None else ".")
        ]
    parts = [_latency("TTFT", traffic.ttft, config.ttft_s), _latency("ITL", traffic.itl, config.itl_s)]
    answers = traffic.answer_itl
    if answers is not None and answers.count:
        parts.append(f"{answers.within:.0%} of the answers that ended were within it on average")
    if any(parts):
        said.append("; ".join(part for part in parts if part) + ".")
    if view.queue is not None and view.queue.requests:
        said.append(
            f"{view.queue.requests} requests with {view.queue.tokens} tokens wait for prefill, "
            f"the oldest for {view.queue.oldest_s:.1f} s."
        )
    if view.partial:
        said.append(f"Not everything could be read: {view.partial}.")
    return said


def _latency(name: str, latency: Latency | None, target_s: float) -> str:
    if latency is None or not latency.count:
        return ""
    return (
        f"{name} was {duration(latency.mean_s)} on average and {duration(latency.p95_s)} for the slowest 5%, "
        f"{latency.within:.0%} within {duration(target_s)}"
    )


def able(speed: Speed, soon: Outlook, config: PlannerConfig) -> list[str]:
    """What one worker can do, and which target is out of reach."""
    prefill, decode = soon.prefill, soon.decode
    said = [
        f"A prefill worker computes {prefill.per_worker:.0f} tokens a second; a decode worker keeps up with "
        f"{decode.per_worker:.0f} requests at once."
    ]
    for what, factor in (("prefill", speed.prefill_factor), ("decode", speed.decode_factor)):
        if abs(factor - 1.0) >= _WORTH_SAYING:
            off = f"{abs(factor - 1.0):.0%} {'more' if factor > 1 else 'less'}"
            said.append(f"By how many met their targets lately there is {off} to {what} than the rates say.")
    if not prefill.reachable:
        said.append(
            f"The TTFT target of {duration(config.ttft_s)} is out of reach for any number of workers: a usual prompt "
            f"takes {duration(prefill.floor_s)} on an idle one. Planned with is {duration(prefill.target_s)}."
        )
    if not decode.reachable:
        said.append(
            f"The ITL target of {duration(config.itl_s)} is out of reach for any number of workers: a token takes "
            f"{duration(decode.floor_s)} on an idle one. Planned with is {duration(decode.target_s)}."
        )
    return said


def ahead(forecast: Forecast, in_s: float) -> str:
    """What is expected."""
    demand = forecast.demand
    return (
        f"In {in_s:.0f} s {demand.arrivals:.2f} requests a second are expected, with "
        f"{demand.uncached_tokens:.0f} tokens to prefill a second, give or take {forecast.prefill_spread:.0%}, and "
        f"{demand.output_tokens:.0f} to decode, give or take {forecast.decode_spread:.0%} ({forecast.by})."
    )


def startup(seconds: float) -> str:
    """How long a start will take, while none was seen."""
    return f"A start is expected to take {seconds:.0f} s, as those of the workers took that are there."


def reserve(times: float) -> str:
    """For how much more than expected the number of workers is planned."""
    return (
        f"Workers are started and kept for {times - 1.0:.0%} more than that: more requests miss a target than may, "
        "although the workers were expected to be enough."
    )


def splits(now: Split, wanted: Split, either: int, soon: Outlook) -> str:
    """What the present split is worth, and the best one."""
    said = (
        f"Prefilling keeps {soon.prefill.load:.1f} workers busy, decoding {soon.decode.load:.1f}; with {now} "
        f"{soon.worth(now):.0%} are expected to meet both targets"
    )
    if either:
        said += f" ({either} of them do both)"
    if wanted == now:
        return f"{said}, and no other split does better."
    return f"{said}, with {wanted} {soon.worth(wanted):.0%}."


def need(need: Need, total: int, config: PlannerConfig) -> str:
    """How many workers are needed."""
    if need.is_met:
        return (
            f"{need.total} workers are enough for {config.attainment:.0%}; there are {total}, those to come included."
        )
    more = "no more may be had" if need.total >= config.max_workers else "a further one would bring too little"
    return f"With {need.total} workers {need.worth:.0%} are expected to meet both targets, and {more}."


def because(need: Need) -> str:
    """Why workers are started."""
    return f"{need.total} workers are needed, with which {need.worth:.0%} are expected to meet both targets"


def unmoved(role: Role) -> str:
    """Why workers of a kind are started although there are enough of both together."""
    return f"{role} lacks workers, and none may move there so soon after the last move"


def not_worth(now: Split, after: Split, gain: float, config: PlannerConfig) -> str:
    return f"{after} instead of {now} would bring {gain:.1%} more; a move must bring {config.worth:.0%}."


def too_dear(now: Split, after: Split, config: PlannerConfig) -> str:
    return f"{after} instead of {now} would not make up within {config.payback_s:.0f} s for what the move itself costs."


def gradually(enough: int, rest_s: float, one_of: int) -> str:
    """Why none of those that are too many goes just now."""
    return f"{enough} workers would be enough, but within {rest_s:.0f} s no more than one of {one_of} goes."


def why_move(now: Split, after: Split, worth: float, better: float) -> str:
    return f"with {after} {better:.0%} instead of {worth:.0%} with {now} are expected to meet both targets"


def nobody(sight: Sight, to: Role, config: PlannerConfig) -> str:
    """Why no worker can be moved into a role."""
    source = Role.DECODE if to is Role.PREFILL else Role.PREFILL
    if len(sight.moving) >= config.max_changes:
        return f"{len(sight.moving)} changes are under way, and no more than {config.max_changes} may be."
    if not spare(sight, source):
        return f"The last {source} worker stays what it is."
    if not movable(sight, source, config):
        return f"No {source} worker can be asked: they are held by hand, were asked in vain, or their load is unknown."
    return "Nobody can be moved just now."


def verdict(actions: Sequence[Action], now: Split, soon: Outlook, sight: Sight, held_back: Sequence[str]) -> str:
    """One sentence."""
    if not actions:
        kept = f"{now} stays, with which {soon.worth(now):.0%} are expected to meet both targets"
        return f"Nothing is changed: {held_back[-1][0].lower()}{held_back[-1][1:]}" if held_back else f"{kept}."
    said = []
    for role in Role:
        moved = [action.worker for action in actions if isinstance(action, MoveAction) and action.to is role]
        if moved:
            said.append(f"{', '.join(moved)} {'becomes' if len(moved) == 1 else 'become'} {role}")
        added = sum(action.count for action in actions if isinstance(action, AddAction) and action.role is role)
        if added:
            said.append(f"{added} {role} worker{'s are' if added > 1 else ' is'} started")
    gone = [action.worker for action in actions if isinstance(action, RemoveAction)]
    if gone:
        said.append(f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} taken away")
    why = actions[0].why
    return f"{', '.join(said)}: {why}."


def numbers(demand: Demand, soon: Outlook, pace: Speed, sight: Sight) -> dict[str, float]:
    """The figures that entered, with their units in the names."""
    found = {
        "arrivals_per_s": demand.arrivals,
        "uncached_tokens_per_s": demand.uncached_tokens,
        "output_tokens_per_s": demand.output_tokens,
        "prefill_load_workers": soon.prefill.load,
        "decode_load_workers": soon.decode.load,
        "prefill_factor": pace.prefill_factor,
        "decode_factor": pace.decode_factor,
        "prefill_workers": float(len(sight.prefill)),
        "decode_workers": float(len(sight.decode)),
        "both_workers": float(len(sight.both)),
        "starting_workers": float(sum(sight.starting.values())),
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def duration(seconds: float) -> str:
    """In milliseconds below one second."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
