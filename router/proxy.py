"""One inference request from the client's bytes to the worker's answer.

The choices are made by `placement`; here is their order, and what happens when a worker fails:
- the prefill leg fails in any way: the request goes whole to a decode worker, whose answer then counts;
- the decode leg fails before the first byte of its answer's body: another worker gets the request, a few times at
  most (vLLM sends the head of a stream before it computes anything, so the head is held back until then).
  Transfer parameters go along only if the first worker cannot have used them: a hand-off is read once;
- it fails later: the client's stream ends with an error event, or is cut where no event can be sent.
Every retry chooses again, without the workers that failed. A client that leaves cancels this task, which closes the
connection to the worker at once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from http import HTTPStatus

import msgspec

from vllm_pd.router.attempt import Attempt, Placed
from vllm_pd.router.call import Call, CallReader, Endpoint, nothing_decodes
from vllm_pd.router.decision import Reason
from vllm_pd.router.directory import Directory
from vllm_pd.router.explanation import DECISION_HEADER, decision_header
from vllm_pd.router.headers import to_client, to_worker
from vllm_pd.router.legs import (
    PRIORITY_HEADER,
    decode_body,
    own_priority,
    prefill_body,
    prioritised_body,
    transfer_params,
)
from vllm_pd.router.metrics import RouterMetrics, status_name
from vllm_pd.router.placement import Placement, Placer
from vllm_pd.router.replies import send_error, sse_error
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.transport import (
    ClientReply,
    ClientRequest,
    ConnectFailed,
    Disconnected,
    FirstByteTimeout,
    Headers,
    StreamLost,
    StreamStalled,
    Upstream,
    UpstreamError,
    UpstreamResponse,
    header,
)
from vllm_pd.router.worker import Worker

MAX_DECODE_ATTEMPTS = 3
MAX_PREFILL_ATTEMPTS = 2
MAX_PREFILL_ANSWER = 64 * 1024 * 1024
"""Bytes. Transfer parameters list every block of the prompt, so long prompts have long answers."""
_RETRIED_STATUS = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE})
"""503 is the worker's refusal before it does anything. 502 comes from a proxy in front of one that broke off."""
RANK_HEADER = "X-data-parallel-rank"
"""By it vLLM's API server passes a request to one of its engines."""
_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d+)')

_log = logging.getLogger(__name__)


class Proxy:
    """Serves the inference endpoints."""

    def __init__(
        self,
        settings: RouterSettings,
        directory: Directory,
        upstream: Upstream,
        calls: CallReader,
        placer: Placer,
        metrics: RouterMetrics,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._upstream = upstream
        self._calls = calls
        self._placer = placer
        self._metrics = metrics

    async def serve(self, endpoint: Endpoint, request: ClientRequest, reply: ClientReply) -> None:
        """Answer one request."""
        call = await self._calls.read(endpoint, request, reply)
        if call is None:
            return
        placement = self._placer.place(call.demand, call.workers, split=True)
        if placement is None:
            # They have changed their roles while the prompt was read.
            await send_error(reply, 503, nothing_decodes(self._directory, call.demand.model))
            return
        try:
            self._planned(call, placement)
            if placement.prefill is not None:
                self._metrics.split.inc()
                await self._prefill(call, placement.prefill)
            else:
                self._metrics.bypass[placement.reason].inc()
                _log.debug("%s goes whole: %s", call.id, placement.reason)
            await self._decode(call)
        finally:
            if call.reserved is not None:
                call.reserved.end()

    def _planned(self, call: Call, placement: Placement) -> None:
        """Count the planned decode leg, or the whole request, on its engine."""
        remote = placement.prefill is not None
        call.decided, call.ttft = time.monotonic(), placement.ttft
        self._metrics.decided(call.demand.policy.name, placement.decode.choice.reason)
        call.reserved = self._placer.begin(placement.decode, remote=remote, silent=call.demand.silent)
        if placement.record is not None:
            text = decision_header(placement.record)
            call.extra = [(DECISION_HEADER, text)]
            _log.debug("%s %s", call.id, text)

    # Prefill leg.

    async def _prefill(self, call: Call, placed: Placed) -> None:
        """Run the prefill leg, first as planned. `call.params` is set on success; without, the request goes whole."""
        began = time.monotonic()
        for _ in range(MAX_PREFILL_ATTEMPTS):
            failure = await self._prefill_on(placed, call)
            if not failure:
                call.prefilled_on = placed.worker.id
                break
            _log.debug("%s prefill on %s failed: %s", call.id, placed.worker.id, failure)
            if failure != "connect":
                break
            call.tried.add(placed.worker.id)
            other = self._placer.place(call.demand, call.workers, split=True, exclude=call.tried)
            if other is None or other.prefill is None:
                break
            assert call.reserved is not None
            call.reserved.end()
            self._planned(call, other)
            placed = other.prefill
        call.prefill_took = time.monotonic() - began
        if failure:
            self._metrics.prefill_fallback.labels(failure).inc()
        else:
            self._metrics.prefill_seconds.observe(call.prefill_took)

    async def _prefill_on(self, placed: Placed, call: Call) -> str:
        """ "" on success, else why it failed, as a metric's label."""
        worker = placed.worker
        try:
            body = prefill_body(call.body)
        except msgspec.MsgspecError:
            return "unreadable_body"
        headers = self._headers(call, placed, f"{call.id}-prefill")
        headers = [pair for pair in headers if pair[0].lower() != "accept-encoding"]
        deadline = self._settings.prefill_timeout
        answer: UpstreamResponse | None = None
        attempt = self._placer.begin(placed)
        try:
            body, headers = _with_turn(body, headers, attempt, call)
            async with asyncio.timeout(deadline):
                answer = await self._upstream.open("POST", worker.url, call.request.target, headers, body, deadline)
                worker.note_success()
                content = await answer.read(MAX_PREFILL_ANSWER, deadline)
            if answer.status == HTTPStatus.OK:
                attempt.first_byte()
        except ConnectFailed as e:
            self._directory.note_failure(worker, str(e))
            return "connect"
        except (FirstByteTimeout, TimeoutError):
            return "timeout"
        except UpstreamError:
            return "disconnect"
        finally:
            attempt.end()
            if answer is not None:
                answer.close()
        if answer.status != 200:
            return status_name(answer.status)
        self._computed(attempt, call)
        call.params = transfer_params(content)
        return "" if call.params is not None else "no_params"

    # Decode leg, or the whole request.

    async def _decode(self, call: Call) -> None:
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
                tokens = await self._relay(attempt, answer, first, call)
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
        pool = next((worker.pool for worker in call.workers if worker.id == call.prefilled_on), None)
        peers = [worker for worker in call.workers if worker.pool == pool]
        return place(demand, peers, split=False, exclude=tried | {call.prefilled_on}) or place(
            demand, call.workers, split=False, exclude=tried
        )

    def _is_left(self, call: Call) -> bool:
        """Whether there is another worker to try."""
        return any(worker.role.decodes and worker.id not in call.tried for worker in call.workers)

    def _uses_params(self, worker: Worker, call: Call) -> bool:
        """Whether `worker` reads the KV that was prefilled for this request."""
        return (
            call.params is not None
            and worker.id != call.prefilled_on
            and any(w.id == call.prefilled_on and w.pool == worker.pool for w in call.workers)
        )

    def _headers(self, call: Call, placed: Placed, request_id: str | None) -> Headers:
        headers = to_worker(call.request.headers, worker_key=self._settings.worker_api_key, request_id=request_id)
        if placed.worker.record.dp_size > 1 and header(headers, RANK_HEADER.lower()) is None:
            headers.append((RANK_HEADER, str(placed.engine.holder.rank)))
        return headers

    async def _open_decode(self, attempt: Attempt, call: Call) -> UpstreamResponse:
        body, headers = call.body, self._headers(call, attempt.placed, call.request_id)
        if attempt.remote and call.params is not None:
            body = decode_body(body, call.params)
            attempt.prefilled()
        else:
            body, headers = _with_turn(body, headers, attempt, call)
        self._metrics.overhead_seconds.observe(time.monotonic() - call.ready - call.prefill_took)
        return await self._upstream.open(
            call.request.method,
            attempt.worker.url,
            call.request.target,
            headers,
            body,
            self._settings.first_byte_timeout,
        )

    def _note_first(self, attempt: Attempt, answer: UpstreamResponse, call: Call) -> None:
        """The first byte of an answer that the client gets."""
        now = time.monotonic()
        ttft = self._metrics.ttft_split if attempt.remote else self._metrics.ttft_whole
        ttft.observe(now - call.started)
        if answer.status != HTTPStatus.OK:
            return
        attempt.first_byte()
        if not call.demand.silent:
            self._metrics.ttft_error.observe(now - call.decided - call.ttft)
        if not attempt.remote:
            self._computed(attempt, call)
        self._placer.note_session(call.demand, attempt.worker)

    def _computed(self, attempt: Attempt, call: Call) -> None:
        if attempt.worker.record.dp_size == 1 or header(call.request.headers, RANK_HEADER.lower()) is None:
            self._placer.computed(attempt)
        # Else the client has named an engine, and it is not this one's cache that has the blocks.

    async def _relay(self, attempt: Attempt, answer: UpstreamResponse, first: bytes, call: Call) -> int:
        """Pass the answer on as it comes; `first` is the beginning of its body. Never raises UpstreamError.

        Returns about how many tokens it had, where they came one by one, else 0.
        """
        reply, idle = call.reply, self._settings.idle_timeout
        headers = to_client(answer.headers) + call.extra
        if header(headers, "content-length") == str(len(first)):
            self._note_usage(attempt, first)
            await reply.send(answer.status, headers, first)
            return 0
        await reply.start(answer.status, headers)
        chunk, events = first, 0
        while chunk:
            await reply.write(chunk)
            events += chunk.count(b"\n\n")
            if b'"cached_tokens"' in chunk:
                self._note_usage(attempt, chunk)
            try:
                chunk = await answer.next_chunk(idle)
            except StreamLost as e:
                await self._end_broken(headers, reply, f"Worker {attempt.worker.id} broke off its answer: {e}.")
                return events
        await reply.finish()
        return events if not call.demand.silent else 0

    def _note_usage(self, attempt: Attempt, chunk: bytes) -> None:
        """Compare what the answer says of cached tokens with what was predicted."""
        placed = attempt.placed
        if attempt.remote or placed.prompt.why_unknown:
            return
        found = _CACHED_TOKENS.search(chunk)
        if found is not None:
            self._metrics.cached(placed.predicted_cached, int(found[1]), placed.ask.block_size)

    async def _end_broken(self, headers: Headers, reply: ClientReply, problem: str) -> None:
        _log.warning("%s", problem)
        plain = header(headers, "content-encoding") is None and header(headers, "content-length") is None
        if plain and (header(headers, "content-type") or "").startswith("text/event-stream"):
            await reply.write(sse_error(502, problem))
            await reply.finish()
        else:
            reply.abort()


def _with_turn(body: bytes, headers: Headers, attempt: Attempt, call: Call) -> tuple[bytes, Headers]:
    """What is sent, with the turn of its prompt where the engine is to be told.

    A body without a prompt is refused anyway.
    """
    fields = call.demand.fields
    if attempt.turn is None or fields is None or call.demand.forbidden is Reason.NO_PROMPT:
        return body, headers
    told = prioritised_body(body, own_priority(fields.priority, header(headers, PRIORITY_HEADER)), attempt.turn)
    if told is not body:
        headers = [pair for pair in headers if pair[0].lower() != PRIORITY_HEADER]
    return told, headers
