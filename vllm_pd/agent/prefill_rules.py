"""What a worker decides about prefill jobs. Pure: no clock and no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from vllm_pd.holds import RELEASE_FIELD, hold_key
from vllm_pd.state.base import WorkerId, WorkerRecord
from vllm_pd.state.prefill_payload import PrefillAnswer, PrefillRequest, encode_answer, without_credentials
from vllm_pd.state.prefill_queue import QueueDepth

CLOCK_MARGIN_MS = 5000
"""By how much the clocks of a router and a worker may disagree about a deadline."""
_BUDGET_BATCHES = 2
"""Batches' worth of claimed tokens: one that the engine computes, and one that is there when it is done."""
_RANK_HEADER = "x-data-parallel-rank"
_BACK_PRESSURE = (429, 503)
# Of the worker, not of what was asked: its key, its adapters, its speed.
_OWN_FAILURE = (401, 403, 404, 408)
_LONGEST_RETRY_AFTER_S = 5.0
_PAUSE_S = (0.25, 5.0)
_ABORTED_PAUSE_S = 1.0
_MOST_ERROR = 300


class How(StrEnum):
    """How a claimed job ended here."""

    DONE = "done"
    """The server answered, if only that the request is wrong (4xx): that is the job's result."""
    FAILED = "failed"
    """This attempt did; another worker may try."""
    RETURNED = "returned"
    """Not begun, or given up for no fault of the job: no attempt is counted."""
    LOST = "lost"
    """Cancelled, or given to another worker: nothing is left to say."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a job ended, and what to say of it."""

    how: How
    data: bytes = b""
    """The result of a job that is `DONE`."""
    error: str = ""
    """Why it is anything else."""
    pause_s: float = 0.0
    """For how long the worker should claim nothing: its server is overloaded."""
    own_fault: bool = False
    """Whether the worker failed rather than what it was asked."""
    stuck: bool = False
    """Whether its engine does not get on: until it does, nothing more is for it."""


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


class _Body(msgspec.Struct):
    kv_transfer_params: dict[str, object] = {}


_answer = msgspec.json.Decoder(_Answer)
_body = msgspec.json.Decoder(_Body)


def budget_tokens(configured: int, batch_tokens: int, engines: int) -> int:
    """Tokens of claimed jobs that a worker holds at a time: as configured, else from the size of its batches."""
    return configured or max(1, _BUDGET_BATCHES * batch_tokens * engines)


def fits(budget: int, claimed: int) -> int | None:
    """The `fits` of the next claim: any size (-1) on an empty worker, None when nothing more is to be claimed."""
    if claimed == 0:
        return -1
    return budget - claimed if claimed < budget else None


def begun(costs: Sequence[int], budget: int) -> int:
    """How many of the claimed jobs, the oldest first, the engine may have begun: what fits into one of its batches."""
    tokens = 0
    for number, cost in enumerate(costs):
        if tokens * _BUDGET_BATCHES >= budget:
            return number
        tokens += cost
    return len(costs)


def is_idle(budget: int, claimed: int) -> bool:
    """Whether its engine will soon have nothing to prefill, so that it may take from others' streams."""
    return claimed * _BUDGET_BATCHES <= budget


def steal_from(
    depths: Mapping[WorkerId, QueueDepth], before: Mapping[WorkerId, QueueDepth], own: WorkerId
) -> WorkerId | None:
    """The worker with the most tokens waiting, if it does not come to them by itself.

    A job that has just come to a free worker will be claimed there in a moment, and its blocks are there. So only
    from a worker that has something in hand, or whose jobs were waiting at the last look (`before`), too.
    """
    loaded = {
        worker: depth.waiting_tokens
        for worker, depth in depths.items()
        if worker != own and depth.waiting and (depth.claimed or before.get(worker, QueueDepth()).waiting)
    }
    return max(loaded, key=lambda worker: (loaded[worker], worker), default=None)


def time_left_s(request: PrefillRequest, now_ms: int) -> float:
    """How long the job may take from now on, in seconds; 0 or less when nobody waits for it any more.

    Args:
        now_ms: milliseconds since 1970 by this worker's clock.
    """
    return min(request.timeout_ms, request.deadline_ms + CLOCK_MARGIN_MS - now_ms) / 1000


def own_headers(request: PrefillRequest, api_key: str, *, own_stream: bool) -> list[tuple[str, str]]:
    """The headers for the own server, with its own key.

    Args:
        own_stream: whether the router has put the job into this worker's stream: then it has chosen the engine, too.
    """
    headers = [
        pair
        for pair in without_credentials(request.headers)
        if pair[0].lower() not in ("content-length", "transfer-encoding", "host", "connection", "accept-encoding")
        and (own_stream or pair[0].lower() != _RANK_HEADER)
    ]
    if not any(name.lower() == "content-type" for name, _ in headers):
        headers.append(("Content-Type", "application/json"))
    if api_key:
        headers.append(("Authorization", f"Bearer {api_key}"))
    return headers


def verdict_of(status: int, body: bytes, retry_after: str | None, computed_ms: int) -> Verdict:
    """What an answer of the own server means for the job."""
    if status in _BACK_PRESSURE:
        error = f"the server of the worker is overloaded (status {status})"
        return Verdict(How.RETURNED, error=error, pause_s=_seconds(retry_after))
    if status >= 500 or status in _OWN_FAILURE:
        return Verdict(
            How.FAILED, error=f"the server of the worker answered {status}: {_text(body)}", own_fault=status != 404
        )
    if status == 200 and _was_aborted(body):
        # vLLM does so to what it still has, or gets, when it shuts down.
        return Verdict(How.RETURNED, error="the engine of the worker gave it up", pause_s=_ABORTED_PAUSE_S)
    return Verdict(How.DONE, data=encode_answer(PrefillAnswer(status=status, body=body, computed_ms=computed_ms)))


@dataclass(frozen=True, slots=True)
class Release:
    """The request to the own server to let go of a job's blocks."""

    body: bytes
    headers: list[list[tuple[str, str]]]
    """For each engine that may have them."""


def release_of(record: WorkerRecord, request: PrefillRequest, headers: list[tuple[str, str]]) -> Release | None:
    """How to let go of the blocks of this work; None if the router gave them no key.

    Args:
        headers: with which the work was sent.
    """
    key = _hold_of(request)
    if not key:
        return None
    model = record.models[0] if record.models else record.pool.model
    body = {"model": model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {RELEASE_FIELD: [key]}}
    kept = [pair for pair in headers if pair[0].lower() in ("authorization", "content-type", _RANK_HEADER)]
    if record.dp_size <= 1 or any(name.lower() == _RANK_HEADER for name, _ in kept):
        return Release(msgspec.json.encode(body), [kept])
    return Release(msgspec.json.encode(body), [[*kept, (_RANK_HEADER, str(rank))] for rank in range(record.dp_size)])


def pause_after(failures: int) -> float:
    """Seconds to claim nothing after so many failures of this worker in a row: one that is broken and therefore always
    free must not take, and fail, the jobs of all others."""
    first, longest = _PAUSE_S
    return 0.0 if failures < 2 else min(longest, first * 2.0 ** min(failures - 2, 10))


def _hold_of(request: PrefillRequest) -> str:
    """The key of the blocks that the engine keeps when it has done this (`vllm_pd.holds`); empty if it has none."""
    try:
        return hold_key(_body.decode(request.body).kv_transfer_params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _was_aborted(body: bytes) -> bool:
    try:
        return any(choice.finish_reason == "abort" for choice in _answer.decode(body).choices)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # No answer of an engine: whoever asked will see.
        return False


def _seconds(retry_after: str | None) -> float:
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return 1.0
    return min(seconds, _LONGEST_RETRY_AFTER_S) if seconds > 0 else 1.0


def _text(body: bytes) -> str:
    return body[:_MOST_ERROR].decode(errors="replace").strip() or "nothing"
