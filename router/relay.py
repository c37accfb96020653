"""Passes a worker's answer on to the client as it comes."""

from __future__ import annotations

import logging
import re

from vllm_pd.router.attempt import Attempt
from vllm_pd.router.call import Call
from vllm_pd.router.headers import to_client
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.replies import sse_error
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.transport import ClientReply, Headers, StreamLost, UpstreamResponse, header

_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d+)')

_log = logging.getLogger(__name__)


class Relay:
    """Belongs to one router."""

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._metrics = metrics

    async def pass_on(self, attempt: Attempt, answer: UpstreamResponse, first: bytes, call: Call) -> int:
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
