"""One inference request from the client's bytes to the worker's answer.

The choices are made by `decision` and `selection`; here is their order, and what happens when a worker fails:
- the prefill leg fails in any way: the request goes whole to a decode worker, whose answer then counts;
- the decode leg fails before the first byte of its answer's body: another worker gets the request, a few times at
  most (vLLM sends the head of a stream before it computes anything, so the head is held back until then).
  Transfer parameters go along only if the first worker cannot have used them: a hand-off is read once;
- it fails later: the client's stream ends with an error event, or is cut where no event can be sent.
A client that leaves cancels this task, which closes the connection to the worker at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec

from vllm_pd.router.decision import (
    ClusterFacts,
    PromptKind,
    Reason,
    bypass_by_cluster,
    bypass_by_length,
    bypass_by_request,
)
from vllm_pd.router.directory import Directory
from vllm_pd.router.headers import REQUEST_ID, to_client, to_worker
from vllm_pd.router.legs import decode_body, prefill_body, transfer_params
from vllm_pd.router.metrics import RouterMetrics, status_name
from vllm_pd.router.prompt_size import prompt_tokens, worth_a_thread
from vllm_pd.router.replies import send_error, sse_error
from vllm_pd.router.request_fields import RequestFields, read_fields, read_model
from vllm_pd.router.selection import pick_decode, pick_pair
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.tokenizer_cache import TokenizerCache
from vllm_pd.router.transport import (
    BodyError,
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
from vllm_pd.state.base import WorkerId

MAX_DECODE_ATTEMPTS = 3
MAX_PREFILL_ATTEMPTS = 2
MAX_PREFILL_ANSWER = 64 * 1024 * 1024
"""Bytes. Transfer parameters list every block of the prompt, so long prompts have long answers."""
_RETRIED_STATUS = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE})
"""503 is the worker's refusal before it does anything. 502 comes from a proxy in front of one that broke off."""
MAX_NAMED_ID = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path of the allow list; `kind` is None where requests always go whole."""

    path: str
    kind: PromptKind | None = None


@dataclass(slots=True)
class _Call:
    """A request on its way."""

    request: ClientRequest
    reply: ClientReply
    body: bytes
    workers: list[Worker]
    request_id: str | None
    """For `X-Request-Id` where the client named none; None when the client named one, in a header or in the body."""
    base_id: str
    model: str | None
    started: float
    ready: float
    prefill_took: float = 0.0
    params: bytes | None = None
    prefilled_on: WorkerId | None = None
    tried: set[WorkerId] = field(default_factory=set)
    """Not to be asked again for this request."""
    reconnected: set[WorkerId] = field(default_factory=set)
    """Lost the connection once."""


def _new_id() -> str:
    """128 random bits as hex. Names need to differ, not to be secret: no system call."""
    return f"{random.getrandbits(128):032x}"


def _for_header(name: str | None) -> str | None:
    """`name` if it can stand in a header."""
    return name if name and len(name) <= MAX_NAMED_ID and name.isascii() and name.isprintable() else None


class Proxy:
    """Serves the inference endpoints."""

    def __init__(
        self,
        settings: RouterSettings,
        directory: Directory,
        upstream: Upstream,
        tokenizers: TokenizerCache,
        metrics: RouterMetrics,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._upstream = upstream
        self._tokenizers = tokenizers
        self._metrics = metrics

    async def serve(self, endpoint: Endpoint, request: ClientRequest, reply: ClientReply) -> None:
        """Answer one request."""
        started = time.monotonic()
        try:
            body = await request.body(self._settings.max_body_bytes, self._settings.idle_timeout)
        except BodyError as e:
            await send_error(reply, e.status, str(e), [("Connection", "close")])
            return
        ready = time.monotonic()
        fields = read_fields(body) if endpoint.kind is not None else None
        model = fields.model if fields is not None else read_model(body)
        workers = self._directory.serving(model)
        if workers is None:
            named = f"The model {model!r} does not exist" if model else "The request names no model"
            known = ", ".join(self._directory.models)
            await send_error(reply, 404, f"{named}; workers of this router serve {known}.")
            return
        if not any(worker.role.decodes for worker in workers):
            await send_error(reply, 503, self._nothing_decodes(model))
            return
        own_id = header(request.headers, REQUEST_ID.lower())
        in_body = fields.request_id if fields is not None else None
        base_id = own_id or _for_header(in_body) or _new_id()
        shown_id = None if own_id or in_body else base_id
        call = _Call(request, reply, body, workers, shown_id, base_id, model, started, ready)
        reason, prefill = await self._decide(endpoint, fields, workers)
        if prefill is not None:
            self._metrics.split.inc()
            await self._prefill(call, prefill)
        else:
            self._metrics.bypass[reason].inc()
            _log.debug("%s goes whole: %s", base_id, reason)
        await self._decode(call)

    async def _decide(
        self, endpoint: Endpoint, fields: RequestFields | None, workers: list[Worker]
    ) -> tuple[Reason, Worker | None]:
        """Whole or split; with `Reason.SPLIT` the prefill worker to begin with."""
        kind = endpoint.kind
        reason = bypass_by_request(fields, kind)
        if reason is not None or fields is None or kind is None:
            return reason or Reason.UNREADABLE, None
        pair = pick_pair(workers)
        if pair is None or pair.prefill is None:
            return Reason.NO_PREFILL, None
        decode = pair.decode.record
        can_transfer = decode.can_transfer and pair.prefill.record.can_transfer
        missing = bypass_by_cluster(ClusterFacts(prefill_alive=True, can_transfer=can_transfer))
        if missing is not None:
            return missing, None
        block_size = decode.pool.block_size
        tokenizer = self._tokenizers.get(pair.decode.pool, decode.tokenizer)
        if tokenizer is not None and worth_a_thread(fields, kind, block_size):
            size = await asyncio.to_thread(prompt_tokens, fields, kind, block_size, tokenizer)
        else:
            size = prompt_tokens(fields, kind, block_size, tokenizer)
        short = bypass_by_length(size, block_size)
        return (short, None) if short is not None else (Reason.SPLIT, pair.prefill)

    # Prefill leg.

    async def _prefill(self, call: _Call, worker: Worker) -> None:
        """Run the prefill leg, first on `worker`. `call.params` is set on success; without, the request goes whole."""
        began = time.monotonic()
        for _ in range(MAX_PREFILL_ATTEMPTS):
            failure = await self._prefill_on(worker, call)
            if not failure:
                call.prefilled_on = worker.id
                break
            _log.debug("%s prefill on %s failed: %s", call.base_id, worker.id, failure)
            if failure != "connect":
                break
            call.tried.add(worker.id)
            pair = pick_pair([other for other in call.workers if other.id not in call.tried])
            if pair is None or pair.prefill is None:
                break
            worker = pair.prefill
        call.prefill_took = time.monotonic() - began
        if failure:
            self._metrics.prefill_fallback.labels(failure).inc()
        else:
            self._metrics.prefill_seconds.observe(call.prefill_took)

    async def _prefill_on(self, worker: Worker, call: _Call) -> str:
        """ "" on success, else why it failed, as a metric's label."""
        try:
            body = prefill_body(call.body)
        except msgspec.MsgspecError:
            return "unreadable_body"
        headers = to_worker(
            call.request.headers, worker_key=self._settings.worker_api_key, request_id=f"{call.base_id}-prefill"
        )
        headers = [pair for pair in headers if pair[0].lower() != "accept-encoding"]
        deadline = self._settings.prefill_timeout
        answer: UpstreamResponse | None = None
        with self._directory.using(worker):
            try:
                async with asyncio.timeout(deadline):
                    answer = await self._upstream.open("POST", worker.url, call.request.target, headers, body, deadline)
                    worker.note_success()
                    content = await answer.read(MAX_PREFILL_ANSWER, deadline)
            except ConnectFailed as e:
                self._directory.note_failure(worker, str(e))
                return "connect"
            except (FirstByteTimeout, TimeoutError):
                return "timeout"
            except UpstreamError:
                return "disconnect"
            finally:
                if answer is not None:
                    answer.close()
        if answer.status != 200:
            return status_name(answer.status)
        call.params = transfer_params(content)
        return "" if call.params is not None else "no_params"

    # Decode leg, or the whole request.

    async def _decode(self, call: _Call) -> None:
        problem = ""
        status = 502
        for attempts_left in reversed(range(MAX_DECODE_ATTEMPTS)):
            worker = self._next_decode(call)
            if worker is None:
                break
            with self._directory.using(worker):
                answer: UpstreamResponse | None = None
                try:
                    answer = await self._open_decode(worker, call)
                    first = await answer.next_chunk(self._settings.first_byte_timeout)
                    worker.note_success()
                    call.tried.add(worker.id)
                    if answer.status in _RETRIED_STATUS and attempts_left and self._next_decode(call) is not None:
                        if answer.status == HTTPStatus.BAD_GATEWAY:
                            call.params = None
                        self._metrics.decode_retries.labels(status_name(answer.status)).inc()
                        continue
                    await self._relay(worker, answer, first, call)
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
                    if answer is not None:
                        answer.close()
        if status == 502 and not any(worker.role.decodes for worker in self._directory.serving(call.model) or ()):
            # The last resort was a worker that had left, and it is dead indeed.
            status, problem = 503, self._nothing_decodes(call.model)
        await send_error(call.reply, status, problem or "No worker that decodes is left for this request; try again.")

    def _nothing_decodes(self, model: str | None) -> str:
        return self._directory.missing() or (
            f"No worker that decodes is alive for the model {model!r}; start one with --role decode or --role both."
        )

    def _next_decode(self, call: _Call) -> Worker | None:
        """The worker to try next. One that prefilled the request cannot read from itself: it comes last, whole."""
        tried = call.tried
        if call.prefilled_on is None:
            return pick_decode(call.workers, tried)
        pool = next((worker.pool for worker in call.workers if worker.id == call.prefilled_on), None)
        peers = [worker for worker in call.workers if worker.pool == pool]
        return pick_decode(peers, tried | {call.prefilled_on}) or pick_decode(call.workers, tried)

    async def _open_decode(self, worker: Worker, call: _Call) -> UpstreamResponse:
        body = call.body
        if call.params is not None and worker.id != call.prefilled_on and self._same_pool(worker, call):
            body = decode_body(body, call.params)
        headers = to_worker(call.request.headers, worker_key=self._settings.worker_api_key, request_id=call.request_id)
        self._metrics.overhead_seconds.observe(time.monotonic() - call.ready - call.prefill_took)
        return await self._upstream.open(
            call.request.method, worker.url, call.request.target, headers, body, self._settings.first_byte_timeout
        )

    def _same_pool(self, worker: Worker, call: _Call) -> bool:
        return any(w.id == call.prefilled_on and w.pool == worker.pool for w in call.workers)

    async def _relay(self, worker: Worker, answer: UpstreamResponse, first: bytes, call: _Call) -> None:
        """Pass the answer on as it comes; `first` is the beginning of its body. Never raises UpstreamError."""
        reply, idle = call.reply, self._settings.idle_timeout
        headers = to_client(answer.headers)
        ttft = self._metrics.ttft_whole if call.params is None else self._metrics.ttft_split
        ttft.observe(time.monotonic() - call.started)
        if header(headers, "content-length") == str(len(first)):
            await reply.send(answer.status, headers, first)
            return
        await reply.start(answer.status, headers)
        chunk = first
        while chunk:
            await reply.write(chunk)
            try:
                chunk = await answer.next_chunk(idle)
            except StreamLost as e:
                await self._end_broken(headers, reply, f"Worker {worker.id} broke off its answer: {e}.")
                return
        await reply.finish()

    async def _end_broken(self, headers: Headers, reply: ClientReply, problem: str) -> None:
        _log.warning("%s", problem)
        plain = header(headers, "content-encoding") is None and header(headers, "content-length") is None
        if plain and (header(headers, "content-type") or "").startswith("text/event-stream"):
            await reply.write(sse_error(502, problem))
            await reply.finish()
        else:
            reply.abort()
