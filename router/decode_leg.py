"""The decode leg of a request, or the whole request: sent to one worker after another until one begins to answer.

- It fails before the first byte of its answer's body: another worker gets the request, a few times at most (vLLM sends
  the head of a stream before it computes anything, so the head is held back until then). Transfer parameters go along
  only if the first worker cannot have used them: a hand-off is read once.
- It fails later: that is for `continuation`; the answer is cut where it is no stream of events.
Every retry chooses again, without the workers that failed.
"""

from __future__ import annotations

import time
from http import HTTPStatus

from vllm_pd.router.attempt import Attempt
from vllm_pd.router.call import Call, nothing_decodes
from vllm_pd.router.directory import Directory
from vllm_pd.router.leg_request import decode_request, names_rank
from vllm_pd.router.metrics import RouterMetrics, status_name
from vllm_pd.router.placement import Placement, Placer
from vllm_pd.router.relay import Relay
from vllm_pd.router.replies import send_error
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.transport import (
    ConnectFailed,
    Disconnected,
    FirstByteTimeout,
    StreamLost,
    StreamStalled,
    Upstream,
    UpstreamResponse,
)
from vllm_pd.router.worker import Worker

MAX_DECODE_ATTEMPTS = 3
_RETRIED_STATUS = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE})
"""503 is the worker's refusal before it does anything. 502 comes from a proxy in front of one that broke off."""


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
        metrics: RouterMetrics,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._upstream = upstream
        self._placer = placer
        self._relay = relay
        self._metrics = metrics

    async def run(self, call: Call) -> None:
        """Answer the client, from the worker that `call.reserved` names first. `call.params`: it was prefilled."""
        problem = ""
        status = 502
        for attempts_left in reversed(range(MAX_DECODE_ATTEMPTS)):
            attempt = self._next_attempt(call)
            if attempt is None:
                break
            worker = attempt.worker
            answer: UpstreamResponse | None = None
            tokens = 0
            try:
                answer = await self._open_decode(attempt, call)
                first = await answer.next_chunk(self._settings.first_byte_timeout)
                worker.note_success()
                call.tried.add(worker.id)
                if answer.status in _RETRIED_STATUS and attempts_left and self._is_left(call):
                    if answer.status == HTTPStatus.BAD_GATEWAY:
                        call.params = None
                    self._metrics.decode_retries.labels(status_name(answer.status)).inc()
                    continue
                self._note_first(attempt, answer, call)
                tokens = await self._relay.pass_on(attempt, answer, first, call)
                return
            except ConnectFailed as e:
                self._directory.note_failure(worker, str(e))
                problem = f"Worker {worker.id} takes no connections ({e}); check that it is running."
                self._metrics.decode_retries.labels("connect").inc()
                call.tried.add(worker.id)
            except (FirstByteTimeout, StreamStalled) as e:
                problem = f"Worker {worker.id} gave no answer ({e}); it is overloaded or hangs."
                status = 504
                break
            except (Disconnected, StreamLost) as e:
                # It may have read the blocks; they are freed then, and a second read would find other requests' KV.
                call.params = None
                problem = f"Worker {worker.id} ended the connection without an answer ({e}); see its log."
                self._metrics.decode_retries.labels("disconnect").inc()
                # Once may be an idle connection that the worker closed just then, so it gets a second chance.
                if worker.id in call.reconnected:
                    call.tried.add(worker.id)
                call.reconnected.add(worker.id)
            finally:
                attempt.end(tokens)
                if answer is not None:
                    answer.close()
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
            return place(demand, call.workers, split=False, exclude=tried)
        peers = [worker for worker in call.workers if worker.pool == call.prefilled_pool]
        return place(demand, peers, split=False, exclude=tried | {call.prefilled_on}) or place(
            demand, call.workers, split=False, exclude=tried
        )

    def _is_left(self, call: Call) -> bool:
        """Whether there is another worker to try."""
        return any(worker.role.decodes and worker.id not in call.tried for worker in call.workers)

    def _uses_params(self, worker: Worker, call: Call) -> bool:
        """Whether `worker` reads the KV that was prefilled for this request."""
        return call.params is not None and worker.id != call.prefilled_on and worker.pool == call.prefilled_pool

    async def _open_decode(self, attempt: Attempt, call: Call) -> UpstreamResponse:
        if attempt.remote:
            attempt.prefilled()
        body, headers = decode_request(self._settings, attempt, call)
        self._metrics.overhead_seconds.observe(time.monotonic() - call.ready - call.prefill_took)
        before, call.handed = call.handed, call.handed or attempt.remote
        try:
            return await self._upstream.open(
                call.request.method,
                attempt.worker.url,
                call.request.target,
                headers,
                body,
                self._settings.first_byte_timeout,
            )
        except ConnectFailed:
            call.handed = before
            raise

    def _note_first(self, attempt: Attempt, answer: UpstreamResponse, call: Call) -> None:
        """The first byte of an answer that the client gets."""
        now = time.monotonic()
        if not call.continues:
            ttft = self._metrics.ttft_split if attempt.remote else self._metrics.ttft_whole
            ttft.observe(now - call.started)
        if answer.status != HTTPStatus.OK:
            return
        attempt.first_byte()
        if not call.demand.silent:
            self._metrics.ttft_error.observe(now - call.decided - call.ttft)
        if not attempt.remote:
            computed(self._placer, attempt, call)
        self._placer.note_session(call.demand, attempt.worker)
