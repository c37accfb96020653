"""The decode leg of a request, or the whole request: sent to one worker after another until one begins to answer.

- It fails before the first byte of its answer's body: another worker gets the request, a few times at most and within
  the retry budget of all requests (vLLM sends the head of a stream before it computes anything, so the head is held
  back until then). Transfer parameters go along only if the first worker cannot have used them: it reads them once.
- A worker that gives no sign of life meanwhile: the health watch ends the leg, and another worker gets the request.
  So it does with a leg that reads KV from such a worker; the same one may get the request again, to compute all of it.
- It ends before that byte, in whatever way, and the worker was sent transfer parameters: the worker is told that nobody
  wants that hand-off any more (`give_up`).
- It fails later: the client's stream is continued elsewhere or ends with an error event (`continuation`), or is cut
  where no event can be sent.
Every retry chooses again, without the workers that failed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus

from vllm_pd.router.attempt import Attempt
from vllm_pd.router.call import Call, nothing_decodes
from vllm_pd.router.directory import Directory
from vllm_pd.router.give_up import GiveUps, Handed
from vllm_pd.router.headers import rank_in
from vllm_pd.router.health import SOURCE_DOWN
from vllm_pd.router.leg_request import decode_request, names_rank, own_authorization
from vllm_pd.router.metrics import RouterMetrics, status_name
from vllm_pd.router.placement import Placement, Placer
from vllm_pd.router.relay import Relay
from vllm_pd.router.replies import send_error
from vllm_pd.router.retry_budget import RetryBudget
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.transport import (
    ConnectFailed,
    FirstByteTimeout,
    RouterStopping,
    SourceDown,
    StreamStalled,
    Upstream,
    UpstreamError,
    UpstreamResponse,
    WorkerDown,
)
from vllm_pd.router.watched_legs import Leg, Legs
from vllm_pd.router.worker import Worker

MAX_DECODE_ATTEMPTS = 3
"""Workers that take a request. One that kills them must not go round the whole cluster."""
MAX_REFUSALS = 8
"""Workers that take no connection, beside these: they saw nothing of it, and a rack may be gone."""
_RETRIED_STATUS = frozenset(
    {
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
    }
)
"""429 and 503 are refusals before anything is done. 500 is also what requests get whose engine has died, 502 comes from
a proxy in front of a worker that broke off. 504 is not among them: the time is over."""
_ERROR_EVENT = re.compile(rb'\s*data: ?\{"error":.*?"code": ?([45]\d\d)\b', re.DOTALL)
"""How a stream of vLLM begins that failed before its first token: its head said 200 before that."""


CONNECT = "connect"
NO_BUDGET = "no_budget"
"""Label of retries that were not allowed."""
_NO_BUDGET = "Too many requests of late had to be retried, so no other worker was asked; try again (--retry-ratio)."


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why there is no answer, as the client may be told."""

    status: int
    problem: str
    """In one sentence: phase, worker, remedy."""
    reason: str
    """As a metric's label."""
    final: bool = False
    """No other worker is to be asked."""
    paid: bool = False
    """Asking another one has been taken from the retry budget."""


def status_of(answer: UpstreamResponse, first: bytes) -> int:
    """The status that counts: the one in a stream's first event if that is an error."""
    if answer.status == HTTPStatus.OK and first[:16].lstrip().startswith(b"data:"):
        found = _ERROR_EVENT.match(first)
        if found is not None:
            return int(found[1])
    return answer.status


def computed(placer: Placer, attempt: Attempt, call: Call) -> None:
    """The attempt's engine has computed the prompt."""
    if attempt.worker.record.dp_size == 1 or not names_rank(call):
        placer.computed(attempt)
    # Else the client has named an engine, and it is not this one's cache that has the blocks.


class DecodeLeg:
    """Belongs to one router."""

    def __init__(
        self,
        settings: RouterSettings,
        directory: Directory,
        upstream: Upstream,
        placer: Placer,
        relay: Relay,
        legs: Legs,
        budget: RetryBudget,
        give_ups: GiveUps,
        metrics: RouterMetrics,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._upstream = upstream
        self._placer = placer
        self._relay = relay
        self._legs = legs
        self._budget = budget
        self._give_ups = give_ups
        self._metrics = metrics

    async def run(self, call: Call) -> None:
        """Answer the client, from the worker that `call.reserved` names first. `call.params`: it was prefilled."""
        if not call.continues:
            self._budget.note_request()
        failure: _Failure | None = None
        attempts_left, refusals_left = MAX_DECODE_ATTEMPTS, MAX_REFUSALS
        while attempts_left and refusals_left:
            attempt = self._next_attempt(call)
            if attempt is None:
                break
            failure = await self._try(attempt, call, attempts_left - 1)
            if failure is None:
                return
            if failure.reason == CONNECT:
                refusals_left -= 1
            else:
                attempts_left -= 1
            if failure.final or not attempts_left or not refusals_left:
                break
            if not failure.paid and not self._budget.take():
                failure = replace(failure, problem=f"{failure.problem} {_NO_BUDGET}")
                self._metrics.decode_retries.labels(NO_BUDGET).inc()
                break
            self._metrics.decode_retries.labels(failure.reason).inc()
        await self._give_up(call, failure)

    async def _try(self, attempt: Attempt, call: Call, attempts_left: int) -> _Failure | None:
        """One attempt. None when the client has got an answer; what it is told if nobody else can answer, otherwise."""
        worker = attempt.worker
        leg = self._legs.begin(
            worker, attempt.placed.engine.holder.rank, partial(self._has_other, call, worker, attempts_left)
        )
        if attempt.remote and call.prefilled_on is not None:
            source = self._directory.get(call.prefilled_on)
            if source is not None:
                self._legs.begin_read(leg, source, partial(self._may_compute, attempts_left))
        answer: UpstreamResponse | None = None
        tokens = 0
        try:
            deadline = leg.sent + self._settings.first_byte_timeout
            answer = await self._open_decode(attempt, call, leg)
            first = await answer.next_chunk(max(0.001, deadline - time.monotonic()))
            if isinstance(leg.wait.error, SourceDown):
                # Given up just as it began: its connection is closed.
                raise leg.wait.error
            self._legs.end_read(leg)
            status = status_of(answer, first)
            self._directory.note_answer(worker, status, answer.headers)
            call.tried.add(worker.id)
            if status in _RETRIED_STATUS and self._retries_status(status, call, worker, attempts_left):
                problem = f"Worker {worker.id} answered with status {status}, and no other could be asked; try again."
                return _Failure(status, problem, status_name(status), paid=True)
            leg.begun = status == HTTPStatus.OK
            leg.movable = partial(self._can_continue, call, worker)
            self._note_first(attempt, answer, call)
            tokens = await self._relay.pass_on(attempt, answer, first, call)
            broken = call.broken
            if broken is not None and broken.worker is worker and not broken.handed_over and leg.wait.error is None:
                self._directory.note_failed(worker, "it broke off a stream")
            return None
        except UpstreamError as e:
            return self._failure(worker, call, e, begun=leg.begun)
        finally:
            self._legs.end(leg)
            attempt.end(tokens)
            if answer is not None:
                answer.close()
            if attempt.remote and call.handed is not None and not leg.begun:
                self._give_ups.give_up(call.handed)

    def _failure(self, worker: Worker, call: Call, error: UpstreamError, *, begun: bool) -> _Failure:
        """What a leg that failed before the client got anything says of its worker, and of the request."""
        if isinstance(error, ConnectFailed):
            self._directory.note_failure(worker, str(error))
            call.tried.add(worker.id)
            problem = f"Worker {worker.id} takes no connections ({error}); check that it is running."
            return _Failure(502, problem, CONNECT)
        if isinstance(error, RouterStopping):
            return _Failure(503, "This router is being stopped; send the request again.", "stopping", final=True)
        if isinstance(error, FirstByteTimeout | StreamStalled):
            self._directory.note_failed(worker, str(error))
            missing, setting = ("nothing more", "idle-timeout") if begun else ("no first byte", "first-byte-timeout")
            seconds = self._settings.idle_timeout if begun else self._settings.first_byte_timeout
            problem = (
                f"Worker {worker.id} gave no answer: {missing} within {seconds:g} s; it is overloaded or hangs, see "
                f"its log, or give the router a longer --{setting}."
            )
            return _Failure(504, problem, "timeout", final=True)
        # It may have read the blocks; they are freed then, and a second read would find other requests' KV.
        call.params = None
        if isinstance(error, SourceDown):
            if self._has_other(call, worker, 1):
                call.tried.add(worker.id)
            problem = (
                f"Worker {worker.id} could not read the prompt's KV (worker {error}); check that process, and send the "
                "request again."
            )
            return _Failure(504, problem, SOURCE_DOWN, paid=True)
        if isinstance(error, WorkerDown):
            call.tried.add(worker.id)
            problem = f"Worker {worker.id} was given up before its first byte: {error}; check that process."
            return _Failure(504, problem, "down")
        # Once may be an idle connection that the worker closed just then: where it is the only one, it is asked again.
        again = worker.id in call.reconnected
        if again:
            self._directory.note_failed(worker, str(error))
        if again or self._has_other(call, worker, 1):
            call.tried.add(worker.id)
        call.reconnected.add(worker.id)
        problem = f"Worker {worker.id} ended the connection without an answer ({error}); see its log."
        return _Failure(502, problem, "disconnect")

    def _retries_status(self, status: int, call: Call, worker: Worker, attempts_left: int) -> bool:
        """Whether an answer with such a status is worth asking another worker. If not, the client gets the answer."""
        if not self._has_other(call, worker, attempts_left):
            return False
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            if call.failed_inside:
                # Two engines have failed with it: the request is the cause.
                return False
            call.failed_inside = True
        if not self._budget.take():
            self._metrics.decode_retries.labels(NO_BUDGET).inc()
            return False
        # Also one that only refused: vLLM then has the prefill worker let the blocks go.
        call.params = None
        return True

    async def _give_up(self, call: Call, failure: _Failure | None) -> None:
        status = failure.status if failure is not None else 502
        problem = failure.problem if failure is not None else ""
        if status == 502 and not any(
            worker.role.decodes for worker in self._directory.serving(call.demand.model) or ()
        ):
            # The last resort was a worker that had left, and it is dead indeed.
            status, problem = 503, nothing_decodes(self._directory, call.demand.model)
        problem = problem or "No worker that decodes is left for this request; try again."
        await send_error(call.reply, status, problem, call.extra)

    def _next_attempt(self, call: Call) -> Attempt | None:
        """The decode leg to try next, counted on its engine; the planned one first."""
        planned, call.reserved = call.reserved, None
        if planned is not None and not planned.worker.decodes and self._has_other(call, planned.worker, 1):
            # While the prompt was computed, its worker has begun to leave for another role.
            planned.end()
            planned = None
        if planned is not None:
            if planned.remote == self._uses_params(planned.worker, call):
                return planned
            # Its prefill leg failed: the engine has to compute the prompt after all.
            planned.end()
            placed = planned.placed
        else:
            found = self._next_decode(call)
            if found is None:
                return None
            placed = found.decode
        remote = self._uses_params(placed.worker, call)
        return self._placer.begin(placed, remote=remote, silent=call.demand.silent)

    def _next_decode(self, call: Call) -> Placement | None:
        """Another choice. A worker that prefilled the request cannot read from itself: it comes last, whole."""
        place, demand, tried = self._placer.place, call.demand, call.tried
        if call.prefilled_on is None:
            return place(demand, self._workers(call), split=False, exclude=tried)
        workers = self._workers(call)
        peers = [worker for worker in workers if worker.pool == call.prefilled_pool]
        return place(demand, peers, split=False, exclude=tried | {call.prefilled_on}) or place(
            demand, workers, split=False, exclude=tried
        )

    def _workers(self, call: Call) -> Sequence[Worker]:
        """Who may serve the request by now: some have got into trouble since it came, others have joined."""
        pools = {worker.pool for worker in call.workers}
        now = [worker for worker in self._directory.serving(call.demand.model) or () if worker.pool in pools]
        if any(worker.role.decodes and worker.id not in call.tried for worker in now):
            return now
        return call.workers

    def _has_other(self, call: Call, worker: Worker, attempts_left: int) -> bool:
        """Whether a worker that is well could be asked instead of `worker`."""
        return attempts_left > 0 and any(
            other.decodes and other is not worker and not other.is_broken and other.id not in call.tried
            for other in self._workers(call)
        )

    def _may_compute(self, attempts_left: int) -> bool:
        """Whether a prompt that is being read may be computed instead. If so, that is taken from the retry budget."""
        return attempts_left > 0 and self._budget.take()

    def _can_continue(self, call: Call, worker: Worker) -> bool:
        """Whether another worker could go on with the stream that `worker` has begun."""
        tail = call.tail
        return (
            tail is not None
            and not tail.off
            and not tail.opaque
            and call.losses < self._settings.continue_streams
            and self._has_other(call, worker, 1)
        )

    def _uses_params(self, worker: Worker, call: Call) -> bool:
        """Whether `worker` reads the KV that was prefilled for this request."""
        return call.params is not None and worker.id != call.prefilled_on and worker.pool == call.prefilled_pool

    async def _open_decode(self, attempt: Attempt, call: Call, leg: Leg) -> UpstreamResponse:
        if attempt.remote:
            attempt.prefilled()
        body, headers = decode_request(self._settings, attempt, call)
        self._metrics.overhead_seconds.observe(time.monotonic() - call.ready - call.prefill_took)
        self._directory.note_sent(attempt.worker)
        if attempt.remote and call.params is not None:
            own = own_authorization(self._settings, call)
            call.handed = Handed(attempt.worker.record, rank_in(headers), call.params, own)
        try:
            return await self._upstream.open(
                call.request.method,
                attempt.worker.url,
                call.request.target,
                headers,
                body,
                self._settings.first_byte_timeout,
                leg.wait,
            )
        except ConnectFailed:
            # Parameters that an earlier worker may have got are not sent to another one.
            call.handed = None if attempt.remote else call.handed
            raise

    def _note_first(self, attempt: Attempt, answer: UpstreamResponse, call: Call) -> None:
        """The first byte of an answer that the client gets."""
        now = time.monotonic()
        if not call.continues:
            ttft = self._metrics.ttft_split if attempt.remote else self._metrics.ttft_whole
            ttft.observe(now - call.started)
        if answer.status != HTTPStatus.OK:
            return
        if call.served is not None:
            call.served.begun(None if call.demand.silent or call.continues else now - call.started)
        attempt.first_byte()
        if attempt.remote:
            self._metrics.split.inc()
        elif call.prefilled_on is not None:
            own = call.prefilled_on == attempt.worker.id
            (self._metrics.unread_own if own else self._metrics.unread_lost).inc()
        if not call.demand.silent:
            self._metrics.ttft_error.observe(now - call.decided - call.ttft)
        if not attempt.remote:
            computed(self._placer, attempt, call)
        self._placer.note_session(call.demand, attempt.worker)
