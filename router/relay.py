"""Passes a worker's answer on to the client: streams as they come, other answers when they are complete.

A stream of events that breaks off is left open, and `call.broken` says why: `continuation` goes on with it, or ends it.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from vllm_pd.router.attempt import Attempt
from vllm_pd.router.call import Broken, Call
from vllm_pd.router.headers import to_client
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.token_tail import ABORTED, TokenTail
from vllm_pd.router.transport import HandedOver, Headers, RouterStopping, StreamLost, UpstreamResponse, header
from vllm_pd.router.worker import Worker

EVENT_STREAM = "text/event-stream"
MAX_WHOLE_BYTES = 8 * 1024 * 1024
"""Answers with a length up to this one are sent when they are complete."""
_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d+)')

_log = logging.getLogger(__name__)


class Relay:
    """Belongs to one router.

    Args:
        may_leave: whether another worker could go on with a stream exactly, as it stands.
    """

    def __init__(
        self, settings: RouterSettings, metrics: RouterMetrics, may_leave: Callable[[Call, Worker], Awaitable[bool]]
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._may_leave = may_leave

    async def pass_on(self, attempt: Attempt, answer: UpstreamResponse, first: bytes, call: Call) -> int:
        """Pass the answer on as it comes; `first` is the beginning of its body.

        Returns about how many tokens it had, where they came one by one, else 0.

        Raises:
            StreamLost: it broke off before the client was sent anything of it, so another may be asked.
        """
        headers = to_client(answer.headers) + call.extra
        length = _length_of_whole(headers)
        if length is not None:
            body = await self._whole(answer, first, length, call)
            self._note_usage(attempt, body)
            await call.reply.send(answer.status, headers, body)
            return 0
        if call.tail is not None and _is_event_stream(headers):
            return await self._pass_events(attempt, answer, first, call, call.tail, headers)
        if call.continues:
            # Nothing but events fits into the stream that it is to go on with.
            raise StreamLost(f"it answered with status {answer.status} and without events")
        return await self._pass_bytes(attempt, answer, first, call, headers)

    async def _whole(self, answer: UpstreamResponse, first: bytes, length: int, call: Call) -> bytes:
        """An answer in one piece. Of half of it a client has nothing, while another worker can give it whole."""
        parts, size = [first], len(first)
        while size < length:
            chunk = await answer.next_chunk(self._settings.idle_timeout)
            if not chunk:
                raise StreamLost("it closed the connection")
            parts.append(chunk)
            size += len(chunk)
        body = first if len(parts) == 1 else b"".join(parts)
        if answer.status == HTTPStatus.OK and ABORTED in body:
            # So a server ends what it has when it is told to stop.
            raise StreamLost("it gave the request up")
        if call.served is not None:
            call.served.whole(body)
        return body

    async def _pass_bytes(
        self, attempt: Attempt, answer: UpstreamResponse, first: bytes, call: Call, headers: Headers
    ) -> int:
        reply, idle = call.reply, self._settings.idle_timeout
        await reply.start(answer.status, headers)
        chunk, events = first, 0
        while chunk:
            await reply.write(chunk)
            events += chunk.count(b"\n\n")
            if call.served is not None:
                call.served.events(chunk)
            if b'"cached_tokens"' in chunk:
                self._note_usage(attempt, chunk)
            try:
                chunk = await answer.next_chunk(idle)
            except StreamLost as e:
                if _is_event_stream(headers):
                    _note_break(attempt, call, e)
                else:
                    _log.warning("%s lost its answer of worker %s: %s", call.id, attempt.worker.id, e)
                    reply.abort()
                return events
        await reply.finish()
        return events if not call.demand.silent else 0

    async def _pass_events(
        self,
        attempt: Attempt,
        answer: UpstreamResponse,
        first: bytes,
        call: Call,
        tail: TokenTail,
        headers: Headers,
    ) -> int:
        """The same for a stream whose token ids are kept, so that another worker could continue it."""
        reply, idle, worker = call.reply, self._settings.idle_timeout, attempt.worker
        chunk, events, started = first, 0, False
        try:
            while chunk:
                events += chunk.count(b"\n\n")
                if b'"cached_tokens"' in chunk:
                    self._note_usage(attempt, chunk)
                tokens = len(tail.ids)
                data = tail.feed(chunk)
                if call.served is not None:
                    call.served.events(chunk, None if tail.off else len(tail.ids) - tokens)
                if data:
                    if not started:
                        started = True
                        await reply.start(answer.status, headers)
                    await reply.write(data)
                if tail.failure:
                    raise StreamLost(tail.failure)
                if worker.hands_off and started and not call.stays and await self._may_leave(call, worker):
                    raise HandedOver("it is to do something else")
                chunk = await answer.next_chunk(idle)
            if not tail.done and not tail.off:
                raise StreamLost("it closed the connection")
        except StreamLost as e:
            if not started:
                tail.restart()
                raise
            _note_break(attempt, call, e)
            return events
        await reply.finish()
        return events

    def _note_usage(self, attempt: Attempt, chunk: bytes) -> None:
        """Compare what the answer says of cached tokens with what was predicted."""
        placed = attempt.placed
        if attempt.remote or placed.prompt.why_unknown:
            return
        found = _CACHED_TOKENS.search(chunk)
        if found is not None:
            self._metrics.cached(placed.predicted_cached, int(found[1]), placed.ask.block_size)


def _note_break(attempt: Attempt, call: Call, error: StreamLost) -> None:
    stopping, handed_over = isinstance(error, RouterStopping), isinstance(error, HandedOver)
    if stopping:
        problem = "This router is being stopped, and the time it gives answers in progress (--shutdown-grace) is over."
    elif handed_over:
        problem = f"Worker {attempt.worker.id} was to do something else."
    else:
        problem = f"Worker {attempt.worker.id} broke off its answer: {error}."
    _log.log(logging.INFO if handed_over else logging.WARNING, "%s: %s", call.id, problem)
    call.broken = Broken(attempt.worker, problem, time.monotonic(), stopping, handed_over)


def _length_of_whole(headers: Headers) -> int | None:
    """Bytes of an answer that is waited for; None for one that is passed on as it comes."""
    length = header(headers, "content-length")
    if length is None or not length.isdecimal() or int(length) > MAX_WHOLE_BYTES:
        return None
    return None if (header(headers, "content-type") or "").startswith(EVENT_STREAM) else int(length)


def _is_event_stream(headers: Headers) -> bool:
    """Whether events can be read from the body, and added to it."""
    plain = header(headers, "content-encoding") is None and header(headers, "content-length") is None
    return plain and (header(headers, "content-type") or "").startswith(EVENT_STREAM)
