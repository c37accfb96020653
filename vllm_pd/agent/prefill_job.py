"""One claimed prefill job: from the claim to what the queue is told about its end."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from vllm_pd.agent import prefill_rules as rules
from vllm_pd.agent.prefill_own_server import OwnApi, PostFailed
from vllm_pd.agent.prefill_progress import EngineProgress
from vllm_pd.agent.prefill_rules import How, Release, Verdict
from vllm_pd.background import end_tasks
from vllm_pd.errors import StoreError
from vllm_pd.state.base import PoolId, WorkerRecord
from vllm_pd.state.prefill_payload import PrefillRequest, decode_request
from vllm_pd.state.prefill_queue import Claim, PrefillQueue

logger = logging.getLogger("vllm.vllm_pd")

_EXTENSIONS = 3
"""How often the queue is told of a job within the time after which it gives it away."""
_AGAIN_S = (0.1, 2.0)
_LEAST_SAY_S = 1.0
_RELEASE_PATH = "/v1/completions"
_RELEASE_S = 5.0


@dataclass(frozen=True, slots=True)
class JobTools:
    """What every job of a worker is done with."""

    record: WorkerRecord
    queue: PrefillQueue
    api: OwnApi
    api_key: str = field(repr=False)
    progress: EngineProgress
    visibility_s: float

    @property
    def pool(self) -> PoolId:
        return self.record.pool.id

    async def let_go(self, release: Release) -> None:
        """Ask the server for it. Never raises."""
        for headers in release.headers:
            try:
                await self.api.post(_RELEASE_PATH, headers, release.body, _RELEASE_S)
            except PostFailed as e:
                logger.debug("blocks of a cancelled prefill job stay until their lease ends: %s", e)


class RunningJob:
    """Made when the job has been claimed. `run`, then `say`."""

    def __init__(self, tools: JobTools, claim: Claim) -> None:
        self.claim = claim
        self.cancelled = False
        """Whether nobody waits for it: it is over and comes to no worker again."""
        self._request: PrefillRequest | None = None
        self._tools = tools
        self._began = tools.progress.now
        self._until = time.monotonic() + _LEAST_SAY_S
        self._ended: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()

    def end(self, verdict: Verdict) -> None:
        """End it this way unless it has ended: its connection is closed, and vLLM gives it up."""
        if not self._ended.done():
            self._ended.set_result(verdict)

    async def run(self) -> Verdict:
        """Have it computed. Never raises but for its own cancellation, which says nothing to anybody."""
        try:
            request = decode_request(self.claim.job.payload)
        except (ValueError, RecursionError) as e:
            return Verdict(How.FAILED, error=f"the job cannot be read ({e}); router and worker differ in their version")
        left_s = rules.time_left_s(request, time.time_ns() // 1_000_000)
        if left_s <= 0:
            return Verdict(How.FAILED, error="its deadline was over before a worker began")
        self._until = time.monotonic() + max(_LEAST_SAY_S, left_s)
        self._request = request
        tasks = [asyncio.create_task(self._compute(request, left_s)), asyncio.create_task(self._keep())]
        for task in tasks:
            task.add_done_callback(self._hear)
        try:
            return await asyncio.shield(self._ended)
        finally:
            await end_tasks(tasks)

    async def say(self, verdict: Verdict) -> bool:
        """Tell the queue, again and again while the store does not answer, for as long as somebody waits.

        Returns whether the queue took it: the job was still this worker's.
        """
        queue, pool, claim = self._tools.queue, self._tools.pool, self.claim
        pause, longest = _AGAIN_S
        while verdict.how is not How.LOST:
            try:
                if verdict.how is How.DONE:
                    return await queue.ack(pool, claim, verdict.data)
                if verdict.how is How.FAILED:
                    return await queue.fail(pool, claim, verdict.error)
                return await queue.release(pool, claim)
            except StoreError as e:
                if time.monotonic() + pause > self._until:
                    logger.warning("vllm-pd: the end of prefill job %s could not be told: %s", claim.job.id, e)
                    return False
            await asyncio.sleep(pause)
            pause = min(longest, 2 * pause)
        return False

    def release(self) -> Release | None:
        """How to let go of its blocks, if the engine has done it: else they stay until their lease ends.

        Only for a job that was cancelled. One that may come back would keep nothing at its next attempt.
        """
        if self._request is None:
            return None
        return rules.release_of(self._tools.record, self._request, self._headers(self._request))

    def _headers(self, request: PrefillRequest) -> list[tuple[str, str]]:
        own_stream = self.claim.job.worker == self.claim.claimant.worker
        return rules.own_headers(request, self._tools.api_key, own_stream=own_stream)

    def _hear(self, task: asyncio.Task[Verdict]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            logger.error("vllm-pd: prefill job %s failed unexpectedly", self.claim.job.id, exc_info=error)
            self.end(Verdict(How.FAILED, error=f"the worker failed unexpectedly ({error!r})", own_fault=True))
        else:
            self.end(task.result())

    async def _compute(self, request: PrefillRequest, left_s: float) -> Verdict:
        began = time.monotonic()
        self._tools.progress.give()
        try:
            answer = await self._tools.api.post(request.path, self._headers(request), request.body, left_s)
        except PostFailed as e:
            return Verdict(How.FAILED, error=str(e), own_fault=True)
        computed_ms = int((time.monotonic() - began) * 1000)
        return rules.verdict_of(answer.status, answer.body, answer.retry_after, computed_ms)

    async def _keep(self) -> Verdict:
        """Say that the job makes progress, for as long as it may; returns when it is no longer this worker's."""
        tools = self._tools
        every_s = tools.visibility_s / _EXTENSIONS
        while True:
            await asyncio.sleep(every_s)
            if tools.progress.stuck(self._began, tools.visibility_s):
                error = f"the engine of {self.claim.claimant.worker} made no progress"
                return Verdict(How.FAILED, error=error, own_fault=True, stuck=True)
            try:
                if not await tools.queue.extend(tools.pool, self.claim):
                    return Verdict(How.LOST, error="it was cancelled, or given to another worker")
            except StoreError as e:
                # Nobody else can take it meanwhile either: the work goes on.
                logger.debug("prefill job %s could not be extended: %s", self.claim.job.id, e)
