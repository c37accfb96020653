"""Is a worker alive, does its engine compute, has a request got lost? Pure functions over what was seen of its legs.

A byte of an answer, an answer to `/health` and a load report of the engine's last step are signs of life. Silence is
counted from the last of them, and from no earlier than the time since which something is waited for. All times are
monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_STUCK = 4.0
"""A stuck engine is known after so many times the setting, however much work it has."""
PATIENCE_WITH_STEPS = 4.0
"""An engine may take so many times as long as predicted for all prompts sent to it: one step may hold them all."""
SETTLE_S = 3.0
"""Until a request that was just sent shows in the engine's load report."""


@dataclass(frozen=True, slots=True)
class LegView:
    """One leg as it is now.

    Attributes:
        sent: when it was sent.
        waiting: since when nothing has come; 0 while nothing is waited for.
        begun: the first byte of the answer's body has come, so a byte was the engine's last sign here.
    """

    sent: float
    waiting: float
    begun: bool


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The newest load report of one engine.

    Attributes:
        at_ms: when the worker saw that load, by its own clock.
        requests: running and waiting ones.
        seen: when the report reached this router.
    """

    at_ms: int
    requests: int
    seen: float


def silence(now: float, legs: Sequence[LegView], sign: float) -> float:
    """Seconds without a sign of life of whatever serves these legs; 0 if nothing is waited for.

    `sign`: the last one that did not come by a leg.
    """
    waiting = [leg.waiting for leg in legs if leg.waiting]
    if not waiting:
        return 0.0
    heard = max((leg.waiting for leg in legs if leg.waiting and leg.begun), default=0.0)
    return max(0.0, now - max(min(waiting), heard, sign))


def stuck_after(setting: float, predicted: float) -> float:
    """Seconds without a step after which an engine with requests counts as stuck.

    Args:
        setting: what the operator asks for.
        predicted: seconds for all prompts that were sent to it and have no token yet.
    """
    return max(setting, min(PATIENCE_WITH_STEPS * predicted, LONGEST_STUCK * setting))


def missing(now: float, legs: Sequence[LegView], report: EngineReport) -> int:
    """How many of this router's requests the engine does not have, by its report. Others' may hide some of them."""
    settled = sum(now - leg.sent >= SETTLE_S for leg in legs)
    return max(0, settled - report.requests)


def lost_legs(now: float, legs: Sequence[LegView], report: EngineReport, limit: float) -> list[int]:
    """Which legs may be those that the engine does not have, the most silent one first. Positions in `legs`.

    Silent for `limit` seconds at least. Of those without a first byte none, as long as the engine has anything: the API
    server before it may still be reading them.
    """
    silent = [
        i
        for i, leg in enumerate(legs)
        if leg.waiting and now - leg.waiting >= limit and (leg.begun or not report.requests)
    ]
    return sorted(silent, key=lambda i: legs[i].waiting)
