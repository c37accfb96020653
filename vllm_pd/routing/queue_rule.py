"""Rules of the prefill queue as a router uses it: where a job waits, and what becomes of a request whose prefill leg
failed. Pure: no clock, no I/O.

| the prefill leg ended with | ordinary | strict mode (`--require-prefill`) |
|---|---|---|
| hand-off parameters | the decode worker reads the blocks | the same |
| a refusal of the request itself (4xx, unreadable body) | the decode worker refuses or serves it | the same |
| a full queue, nobody who claims the job in time, no worker, back-pressure | the decode worker prefills | 503 |
| a time-out | the decode worker prefills | 504 |
| anything else | the decode worker prefills | 502 |
"""

from __future__ import annotations

from enum import StrEnum
from math import ceil

LONGEST_RETRY_S = 60


class Failure(StrEnum):
    """How a prefill leg can fail, beside `status_*` of an answer. Labels of metrics."""

    CONNECT = "connect"
    DOWN = "down"
    """Its worker gave no sign of life."""
    DISCONNECT = "disconnect"
    TIMEOUT = "timeout"
    UNREADABLE = "unreadable_body"
    NO_PARAMS = "no_params"
    QUEUE_FULL = "queue_full"
    UNCLAIMED = "queue_timeout"
    DEAD_LETTER = "dead_letter"
    NO_WORKER = "no_worker"


BACK_PRESSURE = frozenset({"status_429", "status_503"})
ELSEWHERE = frozenset({Failure.NO_WORKER, Failure.CONNECT, Failure.DOWN, *BACK_PRESSURE})
"""Failures of one worker after which another one is asked."""
_UNAVAILABLE = frozenset({Failure.QUEUE_FULL, Failure.UNCLAIMED, *ELSEWHERE})
_CLIENTS_OWN = frozenset({Failure.UNREADABLE, "status_4xx"})


def refusal(failure: str, *, strict: bool) -> int | None:
    """The HTTP status with which a request is refused whose prefill leg failed; None: a decode worker gets it whole.

    `strict`: decode workers may not prefill.
    """
    if not strict or failure in _CLIENTS_OWN:
        return None
    if failure in _UNAVAILABLE:
        return 503
    return 504 if failure == Failure.TIMEOUT else 502


def retry_after(waiting_tokens: int, seconds_a_token: float, workers: int) -> int:
    """Whole seconds after which to come again: until what waits now is computed, but 1 to 60."""
    seconds = waiting_tokens * seconds_a_token / max(1, workers)
    return max(1, min(LONGEST_RETRY_S, ceil(seconds)))


def waits_for_its_worker(lead: int, *, session: bool) -> bool:
    """Whether a job waits in the stream of the worker it was placed on; else in the one that all share.

    Args:
        lead: blocks of the prompt that this worker holds, or will hold, more than any other that could prefill it.
        session: the request's session is at home there.
    """
    return lead >= 1 or session


class Departure(StrEnum):
    """What becomes of the jobs of a worker that is not registered."""

    KEEP = "keep"
    MOVE_WAITING = "move waiting"
    """What waits in its stream goes to others; what it has claimed is still its own."""
    GIVE_UP = "give up"
    """What it has claimed goes to others too."""


UNKNOWN_S = 5.0
"""A worker that this router has never seen may have registered just now."""
LONGEST_DRAIN_S = 60.0
"""A worker that withdrew gets so long to finish; should it die meanwhile, its claims end by their own time-out."""


def departure(missing_s: float, *, lease_ended: bool | None) -> Departure:
    """What to do with the jobs of a worker that has been missing for `missing_s` seconds.

    `lease_ended`: it went missing because its lease ran out, hence is dead or stopped; False: it withdrew, and finishes
    what it has; None: it was never seen.
    """
    if lease_ended is None:
        return Departure.GIVE_UP if missing_s >= UNKNOWN_S else Departure.KEEP
    return Departure.GIVE_UP if lease_ended or missing_s >= LONGEST_DRAIN_S else Departure.MOVE_WAITING
