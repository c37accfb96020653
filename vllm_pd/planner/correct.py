"""How far the model of capacity is off, from how many requests really met their targets. Pure arithmetic.

Rates say what work takes on average; how irregular it comes, and what they do not know of, shows only in what was
attained. Each kind of work has a factor by which it counts as more or less than the model says. It moves a little each
step, so chance and a demand that was not foreseen move it to and fro, and only what stays leaves a trace.
"""

from __future__ import annotations

import math
from dataclasses import replace

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


def _moved(factor: float, expected: float, measured: Latency | None) -> float:
    log = math.log(factor) * (1.0 - _FORGET)
    if measured is not None and measured.count:
        off = max(-_MOST_OFF, min(_MOST_OFF, expected - measured.within))
        log += (_UP if off > 0 else _DOWN) * off * min(1.0, measured.count / _ENOUGH)
    return max(_LEAST, min(_MOST, math.exp(log)))
