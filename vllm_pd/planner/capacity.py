"""How many requests meet their targets with so many workers of a kind. Pure arithmetic on rates and a demand.

Prefill workers are a queue with several servers: a prompt waits until one is free (Erlang's formula, with lengths as
irregular as those of real prompts), is computed, and handed over. Decode workers share the streams evenly; a step takes
longer the more of them it serves and the more KV it reads, and that settles how many there are at once (Little's law).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_pd.planner.config import PlannerConfig
from vllm_pd.routing.model import Rates

_FULL = 0.9
"""Fraction of KV blocks in use that is planned with: what running answers still need is in the rest."""
_REACHABLE = 1.5
"""A target that not even an idle worker meets is planned with as so many times what an idle worker takes."""
_UNEVEN = 0.05
"""Variance of a decode worker's share of the sequences, over the share."""
_WORKED_OFF_S, _MOST_BACKLOG = 60.0, 0.5
"""In what time that which waits already is to be worked off, and the part of what keeps arriving that is planned for it
at most: where all are overloaded, what waits says only where it waits."""
IRREGULAR = 2.0
"""Mean square of prompt lengths over the square of their mean: they are irregular, as of an exponential law."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is expected to arrive, per second."""

    arrivals: float = 0.0
    prompt_tokens: float = 0.0
    uncached_tokens: float = 0.0
    output_tokens: float = 0.0
    """To be given by the decode workers."""


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Seconds of a decode step: fixed, for each sequence, for each thousand tokens of KV."""

    base: float
    sequence: float
    kv_kilotoken: float = 0.0

    def seconds(self, sequences: float, kilotokens: float) -> float:
        return self.base + sequences * self.sequence + kilotokens * self.kv_kilotoken


@dataclass(frozen=True, slots=True)
class Speed:
    """The usual worker of the pool, as it is planned with."""

    rates: Rates
    step: StepLaw
    kv_tokens: int | None = None
    held_tokens: float | None = None
    """KV tokens that a sequence holds; None: as many as it is long."""
    prefill_factor: float = 1.0
    """By how much more work there is than the rates say, as measured."""
    decode_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Side:
    """What one kind of worker is to do, and how well any number of them does it."""

    load: float
    """Workers that would be busy all the time with it; for decode at the most that a worker may have."""
    ok: tuple[float, ...]
    """Fraction that meets the target with 0, 1, 2, ... workers; never falls."""
    ok_alone: float
    """The same with a worker for every request."""
    floor_s: float
    """What it takes on an idle worker."""
    target_s: float
    """What was planned with: the configured one, or a reachable one in its place."""
    reachable: bool
    per_worker: float
    """How much of it one worker does: prompt tokens a second, or sequences at once."""


def prefill_side(demand: Demand, speed: Speed, config: PlannerConfig, most: int, backlog_tokens: float = 0.0) -> Side:
    """For prefill workers; `backlog_tokens` wait already."""
    rates = speed.rates
    if demand.arrivals <= 0:
        arrivals, new, cached = 0.0, 0.0, 0.0
    else:
        arrivals = demand.arrivals
        new = demand.uncached_tokens / arrivals
        cached = max(0.0, demand.prompt_tokens - demand.uncached_tokens) / arrivals
    variable = (
        new * (rates.prefill_token + cached * rates.prefill_context)
        + new * new * IRREGULAR * 0.5 * rates.prefill_square
    )
    fixed = rates.prefill_base
    service = fixed + variable
    per_token = service / new if new > 0 else rates.prefill_token
    flow = arrivals * service * speed.prefill_factor
    load = flow + min(backlog_tokens * per_token / _WORKED_OFF_S, _MOST_BACKLOG * flow)
    before = fixed + rates.transfer_base
    floor = before + variable
    reachable = config.ttft_s > floor
    target = config.ttft_s if reachable else _REACHABLE * floor
    ok = [0.0]
    blocked = 1.0
    for workers in range(1, most + 1):
        blocked = load * blocked / (workers + load * blocked)
        if load >= workers:
            ok.append(0.0)
            continue
        waits = blocked / (1.0 - load / workers * (1.0 - blocked))
        leaves = (workers - load) / max(service, 1e-9) * 2.0 / IRREGULAR
        ok.append(max(ok[-1], _in_time(waits, leaves, variable, target - before)))
    alone = _in_time(0.0, 1.0, variable, target - before)
    return Side(flow, tuple(ok), alone, floor, target, reachable, 1.0 / max(per_token, 1e-12))


def _in_time(waits: float, leaves: float, mean: float, left: float) -> float:
    """Probability that a wait (with probability `waits` exponential of rate `leaves`, else none) and an exponential
    time of this mean together are at most `left` seconds."""
    if left <= 0:
        return 0.0
    if mean <= 1e-9:
        return 1.0 - waits * math.exp(-leaves * left)
    ends = 1.0 / mean
    alone = 1.0 - math.exp(-ends * left)
    if abs(ends - leaves) < 1e-6 * ends:
        both = 1.0 - (1.0 + ends * left) * math.exp(-ends * left)
    else:
        both = 1.0 - (leaves * math.exp(-ends * left) - ends * math.exp(-leaves * left)) / (leaves - ends)
    return min(1.0, max(0.0, (1.0 - waits) * alone + waits * both))


def decode_side(demand: Demand, speed: Speed, config: PlannerConfig, most: int) -> Side:
    """For decode workers. A request finds the streams that are there and adds itself, and where short answers go with
    long prompts it is larger than the usual stream."""
    step = speed.step
    arrivals = demand.arrivals
    own = (demand.prompt_tokens + demand.output_tokens / 2) / arrivals if arrivals > 0 else 0.0
    held = speed.held_tokens if speed.held_tokens is not None else own
    larger = max(0.0, own - held)
    each = step.sequence + held / 1000 * step.kv_kilotoken
    alone = step.base + step.sequence + max(held, own) / 1000 * step.kv_kilotoken
    reachable = config.itl_s > alone
    target = config.itl_s if reachable else _REACHABLE * alone
    # Streams at once of which one is the request that is judged.
    room = math.inf
    if speed.kv_tokens and held > 0:
        room = max(1.0, (_FULL * speed.kv_tokens - larger) / held)
    left = target - step.base - larger / 1000 * step.kv_kilotoken
    limit = min(room, left / each if each > 0 else math.inf)
    if not math.isfinite(limit):
        limit = 1e6
    tokens = demand.output_tokens * speed.decode_factor
    load = tokens * (step.base + each * limit) / max(limit, 1.0)
    grain = max(1.0, own / held) if held > 0 else 1.0
    ok = [0.0]
    for workers in range(1, most + 1):
        here = tokens / workers
        busy = here * each
        if busy >= 1.0:
            ok.append(0.0)
            continue
        streams = here * step.base / (1.0 - busy)
        # Routers even out what chance gives one worker more than the next; what it gives to all of them is left.
        spread = math.sqrt(max(streams, 1.0) * grain * (1.0 / workers + _UNEVEN))
        ok.append(max(ok[-1], _normal((limit - 1.0 - streams) / spread)))
    return Side(load, tuple(ok), _normal(limit - 1.0), alone, target, reachable, limit)


def _normal(x: float) -> float:
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))
