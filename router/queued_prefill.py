"""Prefill work through the store's queue: the router puts a job, a worker claims it, and its result comes back.

A job waits in the stream of the worker it was placed on where that worker holds more of its prompt than any other, else
in the stream that all share; whoever is free first claims it. Work that cannot go this way is sent to the placed worker
directly, at once: no request waits for a store that is slow or away. Nothing of a client's credentials is put into the
store: of the headers only those that vLLM itself reads go along.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from enum import StrEnum
from http import HTTPStatus

import msgspec

from vllm_pd.errors import QueueFull, StoreError
from vllm_pd.holds import new_key
from vllm_pd.router.attempt import Attempt, Placed
from vllm_pd.router.call import Call
from vllm_pd.router.decode_leg import computed
from vllm_pd.router.directory import Directory
from vllm_pd.router.leg_request import leg_headers, names_rank, order_of, own_authorization, with_turn
from vllm_pd.router.legs import prefill_body, transfer_params
from vllm_pd.router.metrics import status_name
from vllm_pd.router.placement import Placer
from vllm_pd.router.prefill_leg import PrefillDispatch, PrefillOutcome, Way
from vllm_pd.router.queue_metrics import DispatchMetrics
from vllm_pd.router.queue_results import Expected
from vllm_pd.router.queue_watch import PoolQueue, QueueWatch
from vllm_pd.router.release import Hold
from vllm_pd.router.settings import RouterSettings
from vllm_pd.routing.queue_rule import Failure, retry_after, waits_for_its_worker
from vllm_pd.state.base import WorkerId
from vllm_pd.state.prefill_payload import PrefillRequest, decode_answer, encode_request
from vllm_pd.state.prefill_queue import JobId, JobResult, PrefillJob

PUT_DEADLINE_S = 0.05
OWN_DELAY_S = 0.01
MAX_PAYLOAD = 1 << 20
"""Bytes. A longer one would keep the store, and everybody who waits for it, busy for milliseconds."""
UNCLAIMED_SLACK_S = 0.1
"""After the time that a job may wait for a worker, until the store has dropped it for sure."""
CARRIED_HEADERS = frozenset(
    {
        "content-type",
        "traceparent",
        "tracestate",
        "x-data-parallel-rank",
        "x-request-id",
        "x-session-id",
        "x-vllm-priority",
    }
)
SHARED = "shared"

_log = logging.getLogger(__name__)


class Direct(StrEnum):
    """Why work is not put into the queue although there is one."""

    NOT_CLAIMING = "worker_does_not_claim"
    STORE_DOWN = "store_down"
    STORE_SLOW = "store_slow"
    STORE_FAILED = "store_failed"
    LOST = "job_lost"
    """It was put, and then the store fell silent or forgot it."""
    LARGE = "large_body"
    KEY = "client_key"
    """Workers check the client's own key."""
    RANK = "names_rank"
    MODEL = "model_not_everywhere"


class QueuedPrefill:
    """Implements `PrefillDispatch`. Belongs to one router.

    Args:
        direct: takes what does not go through the queue.
    """

    def __init__(
        self,
        settings: RouterSettings,
        directory: Directory,
        placer: Placer,
        watch: QueueWatch,
        direct: PrefillDispatch,
        metrics: DispatchMetrics,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._placer = placer
        self._watch = watch
        self._direct = direct
        self._metrics = metrics
        self._checks_keys = bool(settings.api_key or settings.worker_api_key)
        """Else workers with a key get the client's own."""

    async def run(self, call: Call, placed: Placed) -> PrefillOutcome:
        queue = self._watch.of(placed.worker.pool)
        if queue is None:
            return await self._direct.run(call, placed)
        why = self._why_direct(queue, call, placed)
        if why is None:
            outcome = await self._queued(queue, call, placed)
            if isinstance(outcome, PrefillOutcome):
                return outcome
            why = outcome
        self._metrics.sent_directly(why)
        return await self._direct.run(call, placed)

    def _why_direct(self, queue: PoolQueue, call: Call, placed: Placed) -> Direct | None:
        if placed.worker.id not in queue.claimers:
            return Direct.NOT_CLAIMING
        if not queue.up or not self._directory.store.up:
            return Direct.STORE_DOWN
        if len(call.body) > MAX_PAYLOAD:
            return Direct.LARGE
        if queue.asks_key and not self._checks_keys:
            return Direct.KEY
        if names_rank(call):
            return Direct.RANK
        return Direct.MODEL if call.demand.model is not None and call.demand.model not in queue.models else None

    async def _queued(self, queue: PoolQueue, call: Call, placed: Placed) -> PrefillOutcome | Direct:
        """How it ended in the queue, or why it is to be sent directly after all."""
        hold = new_key()
        try:
            body = prefill_body(call.body, hold)
        except msgspec.MsgspecError:
            return PrefillOutcome(failure=Failure.UNREADABLE, way=Way.QUEUE)
        attempt = self._placer.begin(placed)
        expected = queue.jobs.expect(JobId(f"{random.getrandbits(128):032x}"), hold)
        put: asyncio.Task[str] | None = None
        outcome: PrefillOutcome | Direct | None = None
        try:
            job = self._job(expected.id, body, call, placed, attempt)
            put = asyncio.create_task(self._put(queue, job))
            outcome = await self._follow(queue, expected, put, attempt, call)
        finally:
            attempt.end()
            self._watch.leave(queue, expected, put, read=outcome is not None)
        if outcome is Direct.LOST:
            self._watch.lost(queue, hold, own_authorization(self._settings, call))
        return outcome

    def _job(self, id: JobId, body: bytes, call: Call, placed: Placed, attempt: Attempt) -> PrefillJob:
        settings, best = self._settings, placed.choice.best
        headers = leg_headers(settings, call, placed, f"{call.id}-prefill")
        order = order_of(headers, attempt, call)
        body, headers = with_turn(body, headers, attempt, call)
        session = placed.ask.session == placed.worker.id
        patience_ms = round(settings.prefill_timeout * 1000)
        request = PrefillRequest(
            path=call.demand.path,
            # The HTTP server's own kind of text is none that can be packed.
            headers=[
                (str(name), value) for name, value in headers if name.lower() in CARRIED_HEADERS and value.isprintable()
            ],
            body=body,
            deadline_ms=round(time.time() * 1000) + patience_ms,
            timeout_ms=patience_ms,
        )
        return PrefillJob(
            id,
            max(1, best.uncached),
            encode_request(request),
            worker=placed.worker.id if waits_for_its_worker(placed.lead, session=session) else None,
            order=order,
            router=self._watch.router,
        )

    async def _put(self, queue: PoolQueue, job: PrefillJob) -> str:
        """Add the job to its stream or, if that is full, to the shared one. Returns which it is in."""
        ttl_ms = round(self._settings.queue_timeout * 1000)
        if job.worker is not None:
            try:
                await self._watch.queue.put(queue.pool, job, ttl_ms)
            except QueueFull:
                job = dataclasses.replace(job, worker=None)
            else:
                return str(job.worker)
        await self._watch.queue.put(queue.pool, job, ttl_ms)
        return SHARED

    async def _follow(
        self,
        queue: PoolQueue,
        expected: Expected,
        put: asyncio.Task[str],
        attempt: Attempt,
        call: Call,
    ) -> PrefillOutcome | Direct:
        # Not `asyncio.timeout`: a call that is cancelled costs its connection.
        await asyncio.wait({put}, timeout=PUT_DEADLINE_S)
        if not put.done():
            # Perhaps it was this loop that stood still, and the answer is there already.
            await asyncio.wait({put}, timeout=OWN_DELAY_S)
        if not put.done():
            queue.slow(f"the store took over {PUT_DEADLINE_S * 1000:g} ms for each of several jobs")
            return Direct.STORE_SLOW
        try:
            stream = put.result()
        except QueueFull as e:
            _log.debug("%s: %s", call.id, e)
            wait = retry_after(queue.waiting_tokens, attempt.placed.engine.rates.prefill_token, len(queue.claimers))
            return PrefillOutcome(failure=Failure.QUEUE_FULL, way=Way.QUEUE, retry_after=wait)
        except (StoreError, OSError) as e:
            queue.failed(str(e))
            return Direct.STORE_FAILED
        queue.slow_puts = 0
        expected.queued = True
        failure = await self._wait(queue, expected)
        if failure:
            return PrefillOutcome(failure=failure, way=Way.QUEUE, stream=stream)
        result = expected.result.result()
        if result is None:
            # With nobody left who claims, the placed worker is of those that went.
            return Direct.LOST if queue.claimers else PrefillOutcome(failure=Failure.NO_WORKER, way=Way.QUEUE)
        return self._read(queue, result, stream, expected.hold, attempt, call)

    async def _wait(self, queue: PoolQueue, expected: Expected) -> Failure | None:
        """Until the result is there; why it is not waited for any more, else."""
        left, every = self._settings.prefill_timeout, self._settings.queue_timeout + UNCLAIMED_SLACK_S
        while left > 0:
            await asyncio.wait({expected.result}, timeout=min(every, left))
            left -= every
            if expected.result.done():
                return None
            # Its worker may have died since the last look, so that it waits again.
            if left > 0 and not await self._is_claimed(queue, expected.id):
                return None if expected.result.done() else Failure.UNCLAIMED
        return Failure.TIMEOUT

    async def _is_claimed(self, queue: PoolQueue, job: JobId) -> bool:
        """Whether a worker has it. If the store does not say, the results will show that it is lost."""
        try:
            found = await self._watch.queue.peek(queue.pool, job)
        except (StoreError, OSError):
            return True
        return found is not None and bool(found[0].claimant)

    def _read(
        self, queue: PoolQueue, result: JobResult, stream: str, hold: str, attempt: Attempt, call: Call
    ) -> PrefillOutcome:
        """What a result says."""
        if result.error:
            _log.debug("%s prefill job failed: %s", call.id, result.error)
            return PrefillOutcome(failure=Failure.DEAD_LETTER, way=Way.QUEUE, stream=stream, detail=result.error)
        worker = WorkerId(result.worker)
        known, own = self._directory.get(worker), own_authorization(self._settings, call)
        kept = Hold(known.record, hold, authorization=own) if known is not None else None
        without = PrefillOutcome(failure=Failure.NO_PARAMS, way=Way.QUEUE, stream=stream, hold=kept)
        try:
            answer = decode_answer(result.data)
        except ValueError:
            return without
        if answer.status != HTTPStatus.OK:
            return PrefillOutcome(failure=status_name(answer.status), way=Way.QUEUE, stream=stream)
        if worker == attempt.worker.id:
            attempt.first_byte(answer.computed_ms / 1000)
            computed(self._placer, attempt, call)
        params = transfer_params(answer.body)
        if params is None:
            return without
        return PrefillOutcome(way=Way.QUEUE, stream=stream, params=params, worker=worker, pool=queue.pool, hold=kept)
