"""What a planner is told by its operator."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum

from vllm_pd.errors import SettingsError
from vllm_pd.planner.model import Mode


class Rule(StrEnum):
    """By what a plan is made."""

    SLA = "sla"
    """By what is expected to arrive and how many workers meet the targets then."""
    DYNAMO_LOAD = "dynamo-load"
    """By thresholds on the prefill queue and the decode workers' KV use, as Dynamo's first planner; for comparison."""


@dataclass(frozen=True, slots=True)
class DynamoLoad:
    """Thresholds of the rule `dynamo-load`, with the names and defaults that Dynamo gave them."""

    adjustment_interval_s: float = 30.0
    """Between two decisions, each about the means of the steps in between."""
    prefill_queue_scale_down: float = 0.2
    """Requests that wait for a prefill worker."""
    prefill_queue_scale_up: float = 0.5
    decode_kv_scale_down: float = 0.5
    """Fraction of a decode worker's KV blocks in use, and 0.02 for each request that waits there."""
    decode_kv_scale_up: float = 0.9
    look_ahead: float = 3.0
    """How many more times the queue is to change as it did in this interval before a worker is added for it."""
    waiting_weight: float = 0.02
    grace_intervals: int = 3
    """No decode worker is taken away for so many intervals after one was added."""


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Times are seconds. Raises SettingsError for values that cannot be meant."""

    mode: Mode = Mode.FIXED
    rule: Rule = Rule.SLA
    ttft_s: float = 0.5
    """Target: from a request's arrival to its first token."""
    itl_s: float = 0.05
    """Target: between two tokens of an answer."""
    attainment: float = 0.95
    """Fraction of the requests that are to meet both targets."""
    min_workers: int = 2
    """Of a pool, in the mode `scale`."""
    max_workers: int = 8
    interval_s: float = 10.0
    """Between two steps. The planner counts what it sees by the time that has really passed."""
    max_changes: int = 2
    """Moves, starts and removals that may be under way at once."""
    move_s: float = 10.0
    """How long a change of role takes, until some were seen."""
    start_s: float = 60.0
    """How long a new worker takes to come up at least, until some were seen."""
    start_deadline_s: float = 600.0
    """After that time a worker that was asked for and did not come up is given up."""
    cooldown_s: float = 20.0
    """After a change that moved roles one way: none of the other way for three times as long, none at all for as
    long; only a kind without any worker does not wait."""
    remove_after_s: float = 120.0
    """Workers are taken away once no step wanted as many as there are for so long, or for as long as a start takes;
    half as long is enough once starts were seen to be that quick."""
    payback_s: float = 120.0
    """A move must bring more within this time than it costs while it lasts."""
    stale_s: float = 30.0
    """Older observations are as good as none: nothing is done."""
    worth: float = 0.02
    """A change must be expected to let this fraction of the requests more meet their targets; also what a further
    worker must bring to be asked for."""
    dynamo: DynamoLoad = DynamoLoad()

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SettingsError(f"The planner's {name} is {value}; it must be a number above 0.")
        for name in ("attainment", "worth"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise SettingsError(f"The planner's {name} is {value}; it is a fraction between 0 and 1.")
        for spec in fields(self.dynamo):
            value = getattr(self.dynamo, spec.name)
            if not (math.isfinite(value) and value >= 0):
                raise SettingsError(f"The planner's {spec.name} is {value}; it must be a number of at least 0.")
        if self.max_changes < 1:
            raise SettingsError(f"The planner's max_changes is {self.max_changes}; with less than 1 it can do nothing.")
        if not 1 <= self.min_workers <= self.max_workers:
            raise SettingsError(
                f"The planner may have {self.min_workers} to {self.max_workers} workers; the least must be at least 1 "
                "and not above the most."
            )


_POSITIVE = (
    "ttft_s",
    "itl_s",
    "interval_s",
    "move_s",
    "start_s",
    "start_deadline_s",
    "cooldown_s",
    "payback_s",
    "remove_after_s",
    "stale_s",
)
