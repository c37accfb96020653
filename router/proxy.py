"""One inference request from the client's bytes to the worker's answer.

The choices are made by `placement`; here is their order. A prefill leg that fails in any way: the request goes whole to
a decode worker, whose answer then counts. What happens when a decode worker fails is in `decode_leg`, and what when it
fails in mid-stream in `continuation`. A client that leaves cancels this task, which closes the connection to the
worker at once.
"""

from __future__ import annotations

import logging
import time

from vllm_pd.router.attempt import Placed
from vllm_pd.router.call import Call, CallReader, Endpoint, nothing_decodes
from vllm_pd.router.continuation import Continuation
from vllm_pd.router.decode_leg import DecodeLeg
from vllm_pd.router.directory import Directory
from vllm_pd.router.explanation import DECISION_HEADER, decision_header
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.placement import Placement, Placer
from vllm_pd.router.prefill_leg import CONNECT, PrefillDispatch
from vllm_pd.router.replies import send_error
from vllm_pd.router.transport import ClientReply, ClientRequest

MAX_PREFILL_ATTEMPTS = 2

_log = logging.getLogger(__name__)


class Proxy:
    """Serves the inference endpoints."""

    def __init__(
        self,
        directory: Directory,
        calls: CallReader,
        placer: Placer,
        dispatch: PrefillDispatch,
        decode: DecodeLeg,
        continuation: Continuation,
        metrics: RouterMetrics,
    ) -> None:
        self._directory = directory
        self._calls = calls
        self._placer = placer
        self._dispatch = dispatch
        self._decode = decode
        self._continuation = continuation
        self._metrics = metrics

    async def serve(self, endpoint: Endpoint, request: ClientRequest, reply: ClientReply) -> None:
        """Answer one request."""
        call = await self._calls.read(endpoint, request, reply)
        if call is None:
            return
        await self._answer(call)
        if call.broken is not None:
            await self._continuation.run(call, self._answer)

    async def _answer(self, call: Call) -> None:
        placement = self._placer.place(call.demand, call.workers, split=True, exclude=call.tried)
        if placement is None:
            # They have changed their roles while the prompt was read.
            await send_error(call.reply, 503, nothing_decodes(self._directory, call.demand.model))
            return
        try:
            self._planned(call, placement)
            if placement.prefill is not None:
                self._metrics.split.inc()
                await self._prefill(call, placement.prefill)
            else:
                self._metrics.bypass[placement.reason].inc()
                _log.debug("%s goes whole: %s", call.id, placement.reason)
            await self._decode.run(call)
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

    async def _prefill(self, call: Call, placed: Placed) -> None:
        """Run the prefill leg, first as planned. `call.params` is set on success; without, the request goes whole."""
        began = time.monotonic()
        for _ in range(MAX_PREFILL_ATTEMPTS):
            outcome = await self._dispatch.run(call, placed)
            failure = outcome.failure
            if not failure:
                call.params, call.prefilled_on, call.prefilled_pool = outcome.params, outcome.worker, outcome.pool
                break
            _log.debug("%s prefill on %s failed: %s", call.id, placed.worker.id, failure)
            if failure != CONNECT:
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
