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
from vllm_pd.router.call import Call, CallReader, Endpoint, nothing_decodes, nothing_prefills
from vllm_pd.router.continuation import Continuation
from vllm_pd.router.decision import UNSERVED_IF_STRICT, PromptKind
from vllm_pd.router.decode_leg import DecodeLeg
from vllm_pd.router.demand_report import DemandMeter
from vllm_pd.router.directory import Directory
from vllm_pd.router.explanation import DECISION_HEADER, decision_header
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.placement import Placement, Placer
from vllm_pd.router.prefill_leg import PrefillDispatch, PrefillOutcome
from vllm_pd.router.queue_metrics import DispatchMetrics
from vllm_pd.router.release import Releases
from vllm_pd.router.replies import send_error
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.transport import ClientReply, ClientRequest
from vllm_pd.routing.queue_rule import BACK_PRESSURE, ELSEWHERE, Failure, refusal
from vllm_pd.routing.record import DecisionRecord

MAX_PREFILL_ATTEMPTS = 2
GENERATING = frozenset({"/v1/responses", "/v1/messages"})
"""Paths that generate, beside those with a prompt kind."""

_log = logging.getLogger(__name__)


class Proxy:
    """Serves the inference endpoints."""

    def __init__(
        self,
        settings: RouterSettings,
        releases: Releases,
        dispatched: DispatchMetrics,
        directory: Directory,
        calls: CallReader,
        placer: Placer,
        dispatch: PrefillDispatch,
        decode: DecodeLeg,
        continuation: Continuation,
        metrics: RouterMetrics,
        meter: DemandMeter | None = None,
    ) -> None:
        self._settings = settings
        self._releases = releases
        self._dispatched = dispatched
        self._directory = directory
        self._calls = calls
        self._placer = placer
        self._dispatch = dispatch
        self._decode = decode
        self._continuation = continuation
        self._metrics = metrics
        self._meter = meter

    async def serve(self, endpoint: Endpoint, request: ClientRequest, reply: ClientReply) -> None:
        """Answer one request."""
        call = await self._calls.read(endpoint, request, reply)
        if call is None:
            return
        try:
            await self._answer(call)
            if call.broken is not None:
                await self._continuation.run(call, self._answer)
        finally:
            if call.served is not None:
                call.served.ended()

    async def _answer(self, call: Call) -> None:
        placement = self._placer.place(call.demand, call.workers, split=True, exclude=call.tried)
        if call.served is None:
            self._count(call, placement)
        if placement is None:
            # They have changed their roles while the prompt was read.
            await send_error(call.reply, 503, nothing_decodes(self._directory, call.demand.model))
            return
        if self._settings.require_prefill and placement.reason in UNSERVED_IF_STRICT and not call.continues:
            self._metrics.refused[placement.reason].inc()
            await send_error(call.reply, 503, nothing_prefills(call.demand.model, placement.reason))
            return
        outcome: PrefillOutcome | None = None
        try:
            self._planned(call, placement)
            if placement.prefill is not None:
                outcome = await self._prefill(call, placement.prefill, placement.record)
                # A stream that has begun goes on where it can.
                strict = self._settings.require_prefill and not call.continues
                status = refusal(outcome.failure, strict=strict) if outcome.failure else None
                if status is not None:
                    await self._refuse(call, status, outcome)
                    return
                if outcome.failure:
                    self._metrics.prefill_fallback.labels(outcome.failure).inc()
            else:
                self._metrics.bypass[placement.reason].inc()
                _log.debug("%s goes whole: %s", call.id, placement.reason)
            await self._decode.run(call)
        finally:
            if call.reserved is not None:
                call.reserved.end()
            if outcome is not None and outcome.hold is not None and not outcome.failure and call.handed is None:
                self._releases.release(outcome.hold)

    def _count(self, call: Call, placement: Placement | None) -> None:
        """Tell planners of a request that generates, whether anybody can serve it or not."""
        kind = call.demand.kind
        if self._meter is None or (kind is None and call.demand.path not in GENERATING):
            return
        if placement is None:
            pool = call.workers[0].pool
            tokens = uncached = call.demand.prompt(pool).tokens
        else:
            placed = placement.prefill or placement.decode
            pool, tokens, uncached = placed.worker.pool, placed.ask.tokens, placed.choice.best.uncached
        call.served = self._meter.arrived(pool, tokens, uncached, chat=kind is PromptKind.CHAT)

    async def _refuse(self, call: Call, status: int, outcome: PrefillOutcome) -> None:
        """The prefill leg failed, and decode workers may not do its work."""
        again = [("Retry-After", str(outcome.retry_after))] if status == 503 else []
        await send_error(call.reply, status, _why_refused(outcome, self._settings), [*call.extra, *again])

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

    async def _prefill(self, call: Call, placed: Placed, record: DecisionRecord | None) -> PrefillOutcome:
        """Run the prefill leg, first as planned. `call.params` is set on success; without, the request goes whole."""
        began = time.monotonic()
        for _ in range(MAX_PREFILL_ATTEMPTS):
            outcome = await self._dispatch.run(call, placed)
            failure = outcome.failure
            self._dispatched.ended(outcome.way, failure or "done")
            if record is not None:
                call.extra = [(DECISION_HEADER, decision_header(record, outcome.account))]
            if not failure:
                call.params, call.prefilled_on, call.prefilled_pool = outcome.params, outcome.worker, outcome.pool
                break
            _log.debug("%s prefill on %s failed: %s", call.id, placed.worker.id, failure)
            if outcome.hold is not None:
                self._releases.release(outcome.hold)
            if failure not in ELSEWHERE:
                break
            call.tried.add(placed.worker.id)
            other = self._placer.place(call.demand, call.workers, split=True, exclude=call.tried)
            if other is None or other.prefill is None:
                break
            assert call.reserved is not None
            call.reserved.end()
            self._planned(call, other)
            placed, record = other.prefill, other.record
        call.prefill_took = time.monotonic() - began
        if not failure:
            self._metrics.prefill_seconds.observe(call.prefill_took)
        return outcome


def _why_refused(outcome: PrefillOutcome, settings: RouterSettings) -> str:
    """One sentence: cause and remedy."""
    sentences: dict[str, str] = {
        Failure.QUEUE_FULL: "The prefill queue is full; add prefill workers, or come again later",
        Failure.UNCLAIMED: f"No prefill worker took the prompt within {settings.queue_timeout:g} s; add prefill "
        "workers, or raise --queue-timeout",
        Failure.TIMEOUT: f"The prompt was not computed within {settings.prefill_timeout:g} s; add prefill workers, or "
        "raise --prefill-timeout",
        Failure.NO_WORKER: "No worker that prefills for others is left; check the prefill workers",
        Failure.CONNECT: "The prefill workers take no connections; check that they are running",
        Failure.DOWN: "The prefill workers give no sign of life; check those processes",
    }
    sentences |= dict.fromkeys(
        BACK_PRESSURE, "The prefill workers are too busy; add prefill workers, or come again later"
    )
    cause = f"{outcome.failure}: {outcome.detail}" if outcome.detail else outcome.failure
    unforeseen = f"The prompt could not be computed by a prefill worker ({cause}); see the workers' logs"
    why = sentences.get(outcome.failure, unforeseen)
    return f"{why}. Decode workers do not stand in because of --require-prefill."
