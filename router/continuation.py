"""A stream whose worker was lost: another worker goes on from the tokens that the client has, or the stream ends well.

The continuation is a call of its own, a completion whose prompt is the client's prompt and the answer so far. It is
placed, prefilled and decoded like any other; its events are written in the form of the client's stream
(`continued_events`). Whether it would be exact is decided before the stream begins (`continuable`), from which token
on when it breaks (`token_tail`). What cannot be continued ends with an error event that says which worker was lost,
why nobody goes on, and what can be done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

import msgspec
from msgspec import Raw

from vllm_pd.router.call import COMPLETION, Broken, Call
from vllm_pd.router.continuable import answer_limit, continuation_body, read_body, wants_usage
from vllm_pd.router.continued_call import ContinuedRequest, StreamReply
from vllm_pd.router.decision import bypass_by_request
from vllm_pd.router.directory import Directory
from vllm_pd.router.headers import to_worker
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.prompt_reading import PromptReader
from vllm_pd.router.replies import sse_error
from vllm_pd.router.request_fields import read_fields
from vllm_pd.router.retry_budget import RetryBudget
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.token_tail import TokenTail
from vllm_pd.router.transport import Upstream, UpstreamError
from vllm_pd.router.worker import Worker
from vllm_pd.state.base import WorkerId

HELD_BACK = "\N{REPLACEMENT CHARACTER}"
"""What incomplete bytes are shown as."""
LONGEST_CHARACTER = 4
"""Tokens that one character may take: each has at least one of its bytes."""
LOOKED_AT = 32
"""Tokens at the end of the answer that are turned into text to see whether a character is incomplete."""
CHECK_S = 2.0
LOOK_EVERY_S = 0.25
"""Between two looks at whether a stream that is to be handed over ends with a whole character."""
MAX_TEXT = 1 << 16

_log = logging.getLogger(__name__)


class _Text(msgspec.Struct):
    prompt: str


_text = msgspec.json.Decoder(_Text)


class Continued(StrEnum):
    """What became of a stream that its worker broke off, as a metric's label."""

    CONTINUED = "continued"
    COMPLETED = "completed"
    """All tokens had been sent."""
    FAILED = "failed"
    """Nobody else could go on."""
    ENDED = "ended"
    """With an error event, without asking anybody."""


class Why(StrEnum):
    """Why nobody was asked, beside what `continuable.why_not` finds in the request."""

    OFF = "off"
    STOPPING = "stopping"
    ENDPOINT = "endpoint"
    NO_IDS = "no_ids"
    PARSER = "parser"
    TIMES = "times"
    BUDGET = "budget"
    HELD_BACK = "held_back"
    NO_LIMIT = "no_limit"
    PENALTY = "default_penalty"


_CAUSES: Mapping[str, str] = {
    Why.OFF: "--continue-streams is 0",
    Why.STOPPING: "a router that is being stopped asks nobody",
    Why.ENDPOINT: "only chats and completions can be continued",
    Why.NO_IDS: "it gave no token ids to continue from",
    Why.PARSER: "a parser of the worker (reasoning, tools) made the events, so token ids do not tell what was sent",
    Why.TIMES: "it was continued as often as --continue-streams allows",
    Why.BUDGET: "too many requests of late had to be retried",
    Why.HELD_BACK: "a character had come in part",
    Why.NO_LIMIT: "the worker does not say how long an answer may get",
    Why.PENALTY: "its server's default sampling has a presence or frequency penalty",
}


class _Stop(Exception):
    """The stream is not continued."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Continuation:
    """Belongs to one router."""

    def __init__(
        self,
        settings: RouterSettings,
        directory: Directory,
        upstream: Upstream,
        prompts: PromptReader,
        budget: RetryBudget,
        metrics: RouterMetrics,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._upstream = upstream
        self._prompts = prompts
        self._budget = budget
        self._metrics = metrics

    async def run(self, call: Call, answer: Callable[[Call], Awaitable[None]]) -> None:
        """Bring the stream of `call`, which is broken, to its end, whatever that is. `answer` serves a call."""
        lost: set[WorkerId] = set()
        times, losses, broken = 0, 0, call.broken
        while broken is not None:
            if not broken.handed_over:
                # Else its worker is well, and a last resort.
                lost.add(broken.worker.id)
                losses += 1
            if call.tail is not None and call.tail.finished:
                await self._complete(call, call.tail)
                return
            times += 1
            try:
                following = await self._following(call, broken, lost, times, losses)
            except _Stop as stop:
                await self._end(call, broken, stop.why)
                return
            reply = StreamReply(call.reply, broken.problem, time.monotonic)
            following.reply = reply
            await answer(following)
            if reply.began:
                self._metrics.continuation_seconds.observe(reply.began - broken.at)
            outcome = Continued.FAILED if reply.failed else Continued.CONTINUED
            if broken.handed_over:
                self._metrics.handed_over_streams.labels(outcome).inc()
            else:
                self._metrics.broken_streams.labels(outcome, "").inc()
            _log.info("%s: its stream was %s as %s", call.id, outcome, following.id)
            broken = following.broken

    async def may_leave(self, call: Call, worker: Worker) -> bool:
        """Whether another worker can go on exactly with the stream as it stands, which nobody reads meanwhile. A stream
        for which that will never be so is marked."""
        tail, settings = call.tail, self._settings
        if tail is None or tail.off or tail.opaque or not settings.continue_streams or worker.record.penalises_answers:
            call.stays = True
            return False
        if not tail.prompt or tail.finished or tail.clean < len(tail.ids):
            return False
        # Asked with every piece of the stream, while looking for another worker looks at all of them.
        now = time.monotonic()
        if now < call.next_look:
            return False
        if not self._has_other(call, worker):
            call.next_look = now + LOOK_EVERY_S
            return False
        if (call.limit or self._limit(call, tail, worker)) <= tail.clean:
            call.stays = True
            return False
        if not tail.unsure:
            return True
        call.next_look = now + LOOK_EVERY_S
        members = read_body(call.body)
        assert members is not None
        try:
            async with asyncio.timeout(CHECK_S):
                if await self._held_back(call, members, list(tail.ids[-LOOKED_AT:]), [worker]):
                    return False
        except (TimeoutError, _Stop):
            return False
        tail.unsure = False
        return worker.hands_off and self._has_other(call, worker)

    def _has_other(self, call: Call, worker: Worker) -> bool:
        return any(
            other.decodes and other.pool == worker.pool and other is not worker and not other.is_broken
            for other in self._directory.serving(call.demand.model) or ()
        )

    @staticmethod
    def _limit(call: Call, tail: TokenTail, worker: Worker) -> int:
        """Tokens that the whole answer may have; 0 when that is not known."""
        members, kind, record = read_body(call.body), call.demand.kind, worker.record
        if members is None or kind is None:
            return 0
        limits = [
            answer_limit(members, kind) or record.default_answer_limit,
            record.answer_cap,
            record.max_model_len and record.max_model_len - tail.prompt_tokens,
        ]
        return min((limit for limit in limits if limit), default=0)

    async def _complete(self, call: Call, tail: TokenTail) -> None:
        """Send what stands behind the last token."""
        members = read_body(call.body)
        await call.reply.write(tail.ending(usage=members is not None and wants_usage(members)))
        await call.reply.finish()
        self._metrics.broken_streams.labels(Continued.COMPLETED, "").inc()

    async def _end(self, call: Call, broken: Broken, why: str) -> None:
        """End the stream with an error event."""
        self._metrics.broken_streams.labels(Continued.ENDED, why).inc()
        cause = _CAUSES.get(why) or f"it would not be exact for this request ({why})"
        problem = f"{broken.problem} No other worker continues it: {cause}. Send the request again."
        _log.warning("%s: %s", call.id, problem)
        await call.reply.write(sse_error(502, problem))
        await call.reply.finish()

    async def _following(self, call: Call, broken: Broken, lost: set[WorkerId], times: int, losses: int) -> Call:
        """The call that goes on with the stream of `call`. Raises _Stop."""
        if broken.stopping:
            raise _Stop(Why.STOPPING)
        tail = self._tail(call, losses)
        members, kind = read_body(call.body), call.demand.kind
        assert members is not None and kind is not None
        if broken.worker.record.penalises_answers:
            raise _Stop(Why.PENALTY)
        limit = self._limit(call, tail, broken.worker)
        if not limit:
            raise _Stop(Why.NO_LIMIT)
        # A worker that dies breaks all of its streams at once, and each of them can be served: the first time is free.
        # What keeps breaking is a cluster that fails as a whole.
        if losses > 1 and not broken.handed_over and not self._budget.take():
            raise _Stop(Why.BUDGET)
        workers = self._directory.serving(call.demand.model) or []
        decoders = [worker for worker in workers if worker.role.decodes]
        others = [worker for worker in decoders if worker.id not in lost]
        kept = await self._kept(call, tail, members, broken, others or decoders)
        body = continuation_body(members, tail.prompt, tail.ids[:kept], max(1, limit - kept))
        tail.resume(kept)
        name, fields = f"{call.id}-continued-{times}", read_fields(body)
        demand = replace(
            call.demand,
            request=name,
            path=COMPLETION.path,
            kind=COMPLETION.kind,
            fields=fields,
            forbidden=bypass_by_request(fields, COMPLETION.kind),
            prompts={},
        )
        if workers:
            await self._prompts.read(demand, len(body), workers)
        now = time.monotonic()
        return Call(
            ContinuedRequest(body, call.request.headers),
            call.reply,
            body,
            workers,
            demand,
            name,
            started=now,
            ready=now,
            # A connection that broke does not prove a worker dead: where it is the only one, it is asked again.
            tried=set(lost) if others else set(),
            tail=tail,
            continues=times,
            losses=losses,
            limit=limit,
            served=call.served,
        )

    def _tail(self, call: Call, losses: int) -> TokenTail:
        """What is known of the stream, if that is enough. Raises _Stop."""
        tail = call.tail
        if not self._settings.continue_streams:
            raise _Stop(Why.OFF)
        if tail is None:
            raise _Stop(call.why_no_tail or Why.ENDPOINT)
        if tail.off or not tail.prompt:
            raise _Stop(Why.NO_IDS)
        if tail.opaque:
            raise _Stop(Why.PARSER)
        if losses > self._settings.continue_streams:
            raise _Stop(Why.TIMES)
        return tail

    async def _kept(
        self, call: Call, tail: TokenTail, members: Mapping[str, Raw], broken: Broken, workers: Sequence[Worker]
    ) -> int:
        """How many ids of the answer the client has the text of, and all of it. Raises _Stop."""
        kept = tail.clean
        if tail.unsure:
            ids = list(tail.ids[max(0, kept - LOOKED_AT) : kept])
            alike = [worker for worker in workers if worker.pool == broken.worker.pool]
            try:
                async with asyncio.timeout(CHECK_S):
                    kept -= await self._held_back(call, members, ids, alike)
            except TimeoutError:
                raise _Stop(Why.HELD_BACK) from None
        if kept < len(tail.ids) and tail.shows_counts:
            # The client knows of tokens that would be drawn again.
            raise _Stop(Why.HELD_BACK)
        return kept

    async def _held_back(
        self, call: Call, members: Mapping[str, Raw], ids: list[int], workers: Sequence[Worker]
    ) -> int:
        """How many ids at the end are a part of a character, by a worker's tokenizer. Raises _Stop."""
        for worker in workers:
            try:
                for less in range(min(LONGEST_CHARACTER, len(ids))):
                    text = await self._text(call, members, ids[: len(ids) - less], worker)
                    if not text.endswith(HELD_BACK):
                        return less
            except (UpstreamError, msgspec.DecodeError) as e:
                _log.debug("worker %s does not detokenize: %s", worker.id, e)
        raise _Stop(Why.HELD_BACK)

    async def _text(self, call: Call, members: Mapping[str, Raw], ids: list[int], worker: Worker) -> str:
        """Raises UpstreamError and DecodeError."""
        headers = to_worker(call.request.headers, worker_key=self._settings.worker_api_key, request_id=None)
        body = msgspec.json.encode({"model": members.get("model"), "tokens": ids})
        answer = await self._upstream.open("POST", worker.url, "/detokenize", headers, body, CHECK_S)
        try:
            return _text.decode(await answer.read(MAX_TEXT, CHECK_S)).prompt
        finally:
            answer.close()
