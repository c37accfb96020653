"""How far the model of capacity is off, from how many requests really met their targets. Pure arithmetic.

Rates say what work takes on average; how irregular it comes, and what they do not know of, shows only in what was
attained. Each kind of work has a factor by which it counts as more or less than the model says. It moves a little each
step, so chance and a demand that was not foreseen move it to and fro, and only what stays leaves a trace.

Where next to all are expected to meet their targets, a few that do not move such a factor hardly at all, and may be
more than the operator allows. So a total is planned for more than is expected, as long as that many miss; and for a
little less, where fewer do than may.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.learn import start_s
from vllm_pd.planner.memory import Memory
from vllm_pd.planner.model import Latency, Traffic
from vllm_pd.planner.target import Outlook, Split

_UP, _DOWN, _MOST_OFF = 0.3, 0.1, 0.05
"""What a difference between expected and measured fraction moves a factor's logarithm by, and the most that counts.
Too few workers are noticed late, when the answers that they gave end, and cost more than a few too many."""
_ENOUGH = 10
"""Requests of which a fraction is taken as it is."""
_FORGET = 0.002
"""Part of a factor that is forgotten in a step: where nothing can be learned, the model counts in the end."""
_LEAST, _MOST = 0.7, 1.5
_MORE, _MOST_MORE, _LEAST_RESERVE, _MOST_RESERVE = 0.02, 0.05, 0.97, 1.4
"""By what part the reserve goes up in a step in which twice as many missed as may, and the most of it. It goes down as
fast where none did; where so few requests come that less than one may miss in a step, both take longer."""
_HEALTHY = 0.9
"""First tokens wait for room at decode workers, too: below this of them, nothing is said of prefill workers."""


def corrected(memory: Memory, traffic: Traffic, now: Outlook, at_work: Split) -> Memory:
    """The memory with factors that this look moved on. `now` is what was planned with, its doubts included: what they
    cost on average is learned, too."""
    prefills, decodes = now.parts(at_work)
    found = memory
    if now.prefill.reachable and decodes >= _HEALTHY:
        factor = _moved(memory.prefill_factor, prefills, traffic.ttft)
        found = replace(found, prefill_factor=factor)
    if now.decode.reachable:
        found = replace(found, decode_factor=_moved(memory.decode_factor, decodes, traffic.answer_itl))
    return found


def reserved(memory: Memory, traffic: Traffic, config: PlannerConfig, *, is_enough: bool, answer_s: float) -> Memory:
    """The memory with a reserve that follows how many missed a target although the workers were expected to be enough.

    Args:
        is_enough: whether those at work are. Where they were known to be too few, misses say nothing of the model.
        answer_s: how long an answer lasts. One that ends tells of all that time.
    """
    if not is_enough:
        return replace(memory, enough_since=None)
    since = memory.clock if memory.enough_since is None else memory.enough_since
    memory = replace(memory, enough_since=since)
    ttft, itl = traffic.ttft, traffic.answer_itl
    if ttft is None or itl is None or memory.clock - since < answer_s:
        return memory
    may_miss = 1.0 - config.attainment
    over = (1.0 - ttft.within * itl.within) / may_miss - 1.0
    change = min(_MOST_MORE, _MORE * over * min(1.0, ttft.count * may_miss))
    # What a slow start brings comes after the requests that are to pay for it: there, nothing is saved on the guess.
    least = 1.0 if start_s(memory, config) > config.payback_s else _LEAST_RESERVE
    return replace(memory, reserve=max(least, min(_MOST_RESERVE, memory.reserve * (1.0 + change))))


def _moved(factor: float, expected: float, measured: Latency | None) -> float:
    log = math.log(factor) * (1.0 - _FORGET)
    if measured is not None and measured.count:
        off = max(-_MOST_OFF, min(_MOST_OFF, expected - measured.within))
        log += (_UP if off > 0 else _DOWN) * off * min(1.0, measured.count / _ENOUGH)
    return max(_LEAST, min(_MOST, math.exp(log)))
