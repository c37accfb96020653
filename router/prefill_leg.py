"""The prefill leg of a split request: one worker computes the prompt and keeps its blocks for another to read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Protocol

import msgspec

from vllm_pd.holds import new_key
from vllm_pd.router.attempt import Placed
from vllm_pd.router.call import Call
from vllm_pd.router.decode_leg import computed
from vllm_pd.router.directory import Directory
from vllm_pd.router.headers import rank_in
from vllm_pd.router.leg_request import leg_headers, own_authorization, with_turn
from vllm_pd.router.legs import prefill_body, transfer_params
from vllm_pd.router.metrics import status_name
from vllm_pd.router.placement import Placer
from vllm_pd.router.release import Hold, Releases
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.transport import (
    ConnectFailed,
    FirstByteTimeout,
    RouterStopping,
    Upstream,
    UpstreamError,
    UpstreamResponse,
    WorkerDown,
)
from vllm_pd.router.watched_legs import Legs, always
from vllm_pd.router.worker import Worker
from vllm_pd.routing.queue_rule import Failure
from vllm_pd.state.base import PoolId, WorkerId

MAX_PREFILL_ANSWER = 64 * 1024 * 1024
"""Bytes. Transfer parameters list every block of the prompt, so long prompts have long answers."""


class Way(StrEnum):
    """How prefill work gets to a worker."""

    DIRECT = "direct"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOutcome:
    """How a prefill leg ended."""

    way: Way = Way.DIRECT
    stream: str = ""
    """Of the queue: the worker for which it waited, or `shared`."""
    failure: str = ""
    """Why it failed, as a metric's label: a `Failure` or an answer's status; empty on success."""
    detail: str = ""
    """The cause in the words of whoever saw it, where there are any."""
    retry_after: int = 1
    """Seconds, where it is worth trying again."""
    params: bytes | None = None
    """Transfer parameters as raw JSON: what the decode worker reads the blocks by."""
    worker: WorkerId | None = None
    """Who computed it."""
    pool: PoolId | None = None
    """Whose workers may read the blocks."""
    hold: Hold | None = None
    """The blocks; after a failure, those that may be kept all the same. To be released if no decode worker is ever sent
    the parameters."""

    @property
    def account(self) -> dict[str, str | None]:
        """For an explanation."""
        return {
            "way": self.way,
            "stream": self.stream or None,
            "prefilled_on": self.worker,
            "prefill_failure": self.failure or None,
        }


class PrefillDispatch(Protocol):
    """A way in which prefill work gets to a worker."""

    async def run(self, call: Call, placed: Placed) -> PrefillOutcome:
        """Have the prompt computed, on the placed worker or, where the way allows, on another. Ends in bounded time.
        Cancelling it cancels the work."""


class DirectPrefill:
    """The router sends the work to the placed worker itself."""

    def __init__(
        self,
        settings: RouterSettings,
        directory: Directory,
        upstream: Upstream,
        placer: Placer,
        releases: Releases,
        legs: Legs,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._upstream = upstream
        self._placer = placer
        self._releases = releases
        self._legs = legs

    async def run(self, call: Call, placed: Placed) -> PrefillOutcome:
        worker = placed.worker
        try:
            body = prefill_body(call.body, key := new_key())
        except msgspec.MsgspecError:
            return PrefillOutcome(failure=Failure.UNREADABLE)
        headers = leg_headers(self._settings, call, placed, f"{call.id}-prefill")
        headers = [pair for pair in headers if pair[0].lower() != "accept-encoding"]
        deadline = self._settings.prefill_timeout
        hold = Hold(worker.record, key, rank_in(headers), own_authorization(self._settings, call))
        answer: UpstreamResponse | None = None
        outcome: PrefillOutcome | None = None
        attempt = self._placer.begin(placed)
        leg = self._legs.begin(worker, placed.engine.holder.rank, always)
        try:
            body, headers = with_turn(body, headers, attempt, call)
            self._directory.note_sent(worker)
            async with asyncio.timeout(deadline):
                answer = await self._upstream.open(
                    "POST", worker.url, call.request.target, headers, body, deadline, leg.wait
                )
                content = await answer.read(MAX_PREFILL_ANSWER, deadline)
            self._directory.note_answer(worker, answer.status, answer.headers)
            if answer.status == HTTPStatus.OK:
                attempt.first_byte()
                computed(self._placer, attempt, call)
            outcome = _outcome(worker, answer.status, content, hold)
        except ConnectFailed as e:
            self._directory.note_failure(worker, str(e))
            outcome = PrefillOutcome(failure=Failure.CONNECT)
        except (FirstByteTimeout, TimeoutError):
            self._directory.note_failed(worker, f"no prefilled prompt within {deadline:g} s")
            return PrefillOutcome(failure=Failure.TIMEOUT)
        except WorkerDown:
            return PrefillOutcome(failure=Failure.DOWN)
        except RouterStopping:
            return PrefillOutcome(failure=Failure.DISCONNECT)
        except UpstreamError as e:
            self._directory.note_failed(worker, str(e))
            return PrefillOutcome(failure=Failure.DISCONNECT)
        finally:
            self._legs.end(leg)
            attempt.end()
            if answer is not None:
                answer.close()
            if outcome is None:
                # Also where this task is cancelled: it may have been computed all the same.
                self._releases.release(hold)
        return outcome


def _outcome(worker: Worker, status: int, content: bytes, hold: Hold) -> PrefillOutcome:
    """What a complete answer means."""
    if status != HTTPStatus.OK:
        return PrefillOutcome(failure=status_name(status))
    params = transfer_params(content)
    if params is None:
        # It may keep blocks all the same.
        return PrefillOutcome(failure=Failure.NO_PARAMS, hold=hold)
    return PrefillOutcome(params=params, worker=worker.id, pool=worker.pool, hold=hold)
