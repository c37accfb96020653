"""Takes prefill jobs out of the store's queue and has them computed by the own server.

Runs in the agent's thread. It holds claimed jobs up to a budget of tokens, so that the engine always has the next one
and other workers get what it could not begin soon; a job is acknowledged when it is done. Nothing that goes wrong with
a job, the store or the server ends it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from vllm_pd.agent import prefill_rules as rules
from vllm_pd.agent.prefill_job import JobTools, RunningJob
from vllm_pd.agent.prefill_own_server import OwnApi
from vllm_pd.agent.prefill_progress import EngineProgress
from vllm_pd.agent.prefill_rules import How, Release, Verdict
from vllm_pd.agent.spec import PrefillSpec
from vllm_pd.background import end_tasks
from vllm_pd.errors import StoreError
from vllm_pd.state.base import WorkerId, WorkerRecord
from vllm_pd.state.prefill_queue import Claim, Claimant, JobId, PrefillQueue, QueueDepth, QueueLimits

logger = logging.getLogger("vllm.vllm_pd")

_WAIT_S = (0.1, 0.4)
"""How long an idle worker waits for a job to come to it before it looks at others' streams; longer and longer while
there is nothing for anybody."""
_LOADED_WAIT_S = (0.025, 0.1)
"""The same while it computes: what is free changes with every job that ends, and a claim that waits does not hear of
it."""
_LOOK_S = 0.1
"""Between two looks at others' streams."""
_CANCELLED_WAIT_S = 5.0
_STUCK_PAUSE_S = 30.0
_STORE_PAUSE_S = (0.2, 2.0)
_MOST_PEERS = 8
"""Streams looked at in one go, at random of those with jobs: it costs the same in a cluster of any size."""
_UNEXPECTED_PAUSE_S = 1.0
_MOST_REHOMED = 8
"""Calls of `rehome` in a row: routers that have not heard of it may put jobs there as fast as these are moved."""
_MOST_REFUSED = 256


@dataclass(slots=True)
class RunnerStats:
    """What it has done since its start."""

    claimed: int = 0
    stolen: int = 0
    """Those of `claimed` that were waiting for another worker."""
    ended: dict[How, int] = field(default_factory=lambda: dict.fromkeys(How, 0))
    unheard: int = 0
    """Those of `ended` of which the queue wanted to hear no more, or could not."""
    tokens: int = 0
    """Of the jobs claimed now."""


class PrefillRunner:
    """The prefill jobs of one worker. All methods are for one loop.

    Args:
        record: the worker.
        spec: how it prefills.
        queue: not closed by this.
        progress: of its engines.
        limits: those that the queue was opened with.
    """

    def __init__(
        self,
        record: WorkerRecord,
        spec: PrefillSpec,
        queue: PrefillQueue,
        progress: EngineProgress,
        limits: QueueLimits | None = None,
    ) -> None:
        self.stats = RunnerStats()
        self.budget = spec.budget_tokens
        self._me = Claimant(record.id, record.epoch)
        self._pool = record.pool.id
        self._queue = queue
        self._api = OwnApi(spec.server)
        self._progress = progress
        visibility_s = (limits or QueueLimits()).visibility_ms / 1000
        self._tools = JobTools(record, queue, self._api, spec.api_key, progress, visibility_s)
        self._allowed = False
        self._wanted = True
        """Whether the worker's role has it prefill."""
        self._leaving = False
        self._taken_over = False
        self._failures = 0
        self._pause_until = 0.0
        self._stuck: tuple[float, float] | None = None
        """The last sign of an engine that was found to make no progress, and when it is tried again without another."""
        self._wait_s = _WAIT_S[0]
        self._loaded_wait_s = _LOADED_WAIT_S[0]
        self._next_look = 0.0
        self._before: Mapping[WorkerId, QueueDepth] = {}
        self._wake = asyncio.Event()
        self._jobs: dict[RunningJob, asyncio.Task[None]] = {}
        self._refused: dict[JobId, Release] = {}
        """Of those that were done when they were somebody else's, or nobody's, already; the oldest first."""
        self._releases: set[asyncio.Task[None]] = set()
        self._claiming: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to claim as soon as it is allowed."""
        self._claiming = asyncio.create_task(self._repeat(self._claim_next, lambda: not self._leaving))
        self._listening = asyncio.create_task(self._repeat(self._drop_cancelled, lambda: True))

    def allow(self, allowed: bool) -> None:
        """Whether this process holds the worker's place: only then it may claim."""
        self._allowed = allowed
        self._wake.set()

    @property
    def jobs(self) -> int:
        """How many jobs it has."""
        return len(self._jobs)

    def take(self, wanted: bool) -> None:
        """Whether the worker's role has it prefill. If not any more, what the engine cannot have begun is given back,
        and the rest ends here. Idempotent."""
        if wanted == self._wanted:
            return
        self._wanted = wanted
        self._wake.set()
        if wanted:
            return
        jobs = list(self._jobs)
        for job in jobs[rules.begun([_cost(job.claim) for job in jobs], self.budget) :]:
            job.end(Verdict(How.RETURNED, error="the worker is to do something else"))

    async def give_away_waiting(self) -> None:
        """What waits for this worker, claimed by nobody, goes to the others, as far as that takes no time to speak of:
        it is asked again and again. Raises StoreError."""
        for _ in range(_MOST_REHOMED):
            if not await self._queue.rehome(self._pool, self._me.worker, claims=False):
                return

    def leave(self) -> None:
        """Claim nothing more; what is claimed goes on. Idempotent."""
        self._leaving = True
        self._wake.set()

    async def drain(self, grace_s: float) -> None:
        """After `leave`: let claimed jobs end for so many seconds, then give them back for others to do."""
        deadline = time.monotonic() + grace_s
        if self._claiming is not None:
            # Not cancelled: the answer to a claim may be on its way, and a job in it would wait to be missed.
            await asyncio.wait((self._claiming,), timeout=_WAIT_S[1] + _STORE_PAUSE_S[1])
        if self._jobs and (left_s := deadline - time.monotonic()) > 0:
            logger.info("vllm-pd: finishing %d prefill jobs.", len(self._jobs))
            await asyncio.wait(self._jobs.values(), timeout=left_s)
        for job in self._jobs:
            job.end(Verdict(How.RETURNED, error="the worker shuts down"))
        if self._jobs:
            await asyncio.wait(self._jobs.values(), timeout=_STORE_PAUSE_S[1])

    async def close(self) -> None:
        """Stop at once and say nothing: jobs that are still claimed are given to others when they are missed."""
        loops = [task for task in (self._claiming, self._listening) if task is not None]
        await end_tasks([*loops, *self._jobs.values(), *self._releases])
        await self._api.close()

    async def _repeat(self, step: Callable[[], Awaitable[None]], wanted: Callable[[], bool]) -> None:
        pause, longest = _STORE_PAUSE_S
        failures = 0
        while wanted():
            try:
                await step()
                failures = 0
            except StoreError as e:
                # The agent has said that it is away.
                logger.debug("the prefill queue does not answer: %s", e)
                await asyncio.sleep(min(longest, pause * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0))
                failures += 1
            except Exception:
                logger.exception("vllm-pd: taking prefill jobs failed unexpectedly; trying again")
                await asyncio.sleep(_UNEXPECTED_PAUSE_S)

    # Claiming.

    async def _claim_next(self) -> None:
        """Claim one job, or wait until there may be one."""
        fits = rules.fits(self.budget, self.stats.tokens)
        pause = self._pause_s()
        if fits is None or pause > 0:
            await self._sleep(pause)
            return
        if not self._taken_over:
            # What an earlier start of this worker had claimed died with it.
            while await self._queue.takeover(self._pool, self._me.worker, self._me.epoch):
                pass
            self._taken_over = True
        tokens = self.stats.tokens
        wait_s = self._loaded_wait_s if tokens else self._wait_s
        claim = await self._queue.claim(self._pool, self._me, fits=fits, wait_ms=int(wait_s * 1000))
        if claim is None and rules.is_idle(self.budget, self.stats.tokens) and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_S
            claim = await self._steal(fits)
        if claim is not None:
            self._wait_s = _WAIT_S[0]
            self._begin(claim)
        self._loaded_wait_s = (
            min(_LOADED_WAIT_S[1], 2 * self._loaded_wait_s) if self.stats.tokens == tokens else _LOADED_WAIT_S[0]
        )

    def _pause_s(self) -> float:
        """Seconds until it may claim as far as is known now; 0 when it may."""
        if not self._allowed or not self._wanted:
            return _STORE_PAUSE_S[1]
        now = time.monotonic()
        if self._stuck is not None:
            seen, until = self._stuck
            if self._progress.last == seen and now < until:
                return _STORE_PAUSE_S[0]
            self._stuck = None
        return max(0.0, self._pause_until - now)

    async def _steal(self, fits: int) -> Claim | None:
        """Take a job that waits for another worker, which has others to do first."""
        peers = [peer for peer in await self._queue.streams(self._pool) if peer != self._me.worker]
        if not peers:
            self._wait_s, self._before = min(_WAIT_S[1], 2 * self._wait_s), {}
            return None
        self._wait_s = _WAIT_S[0]
        if len(peers) > _MOST_PEERS:
            peers = random.sample(peers, _MOST_PEERS)
        found = await self._queue.depth(self._pool, peers)
        depths = {worker: depth for worker, depth in found.items() if worker is not None}
        victim = rules.steal_from(depths, self._before, self._me.worker)
        self._before = depths
        if victim is None or self._leaving:
            return None
        return await self._queue.claim(self._pool, self._me, fits=fits, steal_from=victim)

    # Jobs.

    def _begin(self, claim: Claim) -> None:
        job = RunningJob(self._tools, claim)
        self.stats.claimed += 1
        self.stats.stolen += claim.job.worker not in (None, self._me.worker)
        self.stats.tokens += _cost(claim)
        if self._leaving or self._pause_s() > 0:
            # That was decided while the claim was under way.
            job.end(Verdict(How.RETURNED, error="the worker takes no jobs now"))
        self._jobs[job] = asyncio.create_task(self._do(job))

    async def _do(self, job: RunningJob) -> None:
        try:
            try:
                verdict = await job.run()
            finally:
                self.stats.tokens -= _cost(job.claim)
                self._wake.set()
            self._learn(verdict)
            heard = await job.say(verdict)
            self.stats.ended[verdict.how] += 1
            self.stats.unheard += not heard and verdict.how is not How.LOST
            if (job.cancelled or (verdict.how is How.DONE and not heard)) and (release := job.release()) is not None:
                await self._let_go(job, release)
        except Exception:
            logger.exception("vllm-pd: a prefill job ended unexpectedly; others get it when it is missed")
        finally:
            del self._jobs[job]

    def _learn(self, verdict: Verdict) -> None:
        now = time.monotonic()
        if verdict.how is How.FAILED:
            logger.warning("vllm-pd: a prefill job failed: %s", verdict.error)
        if verdict.own_fault:
            self._failures += 1
            if verdict.stuck:
                self._stuck = self._progress.last, now + _STUCK_PAUSE_S
        elif verdict.how is How.DONE:
            self._failures = 0
        pause_s = max(verdict.pause_s, rules.pause_after(self._failures) if verdict.own_fault else 0.0)
        self._pause_until = max(self._pause_until, now + pause_s)

    async def _drop_cancelled(self) -> None:
        """Have vLLM give up what nobody waits for any more."""
        if not self._wanted and not self._jobs and not self._refused:
            await self._sleep(_STORE_PAUSE_S[1])
            return
        ids = set(await self._queue.cancelled(self._pool, self._me, wait_ms=int(_CANCELLED_WAIT_S * 1000)))
        for job in self._jobs:
            if job.claim.job.id in ids:
                job.cancelled = True
                job.end(Verdict(How.LOST, error="it was cancelled"))
        for id in ids & self._refused.keys():
            task = asyncio.create_task(self._tools.let_go(self._refused.pop(id)))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _let_go(self, job: RunningJob, release: Release) -> None:
        """Now, if it is known that it was cancelled; else when that is said."""
        if job.cancelled:
            await self._tools.let_go(release)
            return
        self._refused[job.claim.job.id] = release
        if len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]

    async def _sleep(self, seconds: float) -> None:
        """Wait, but no longer than until something has changed; 0: until then."""
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds or None):
                await self._wake.wait()
        except TimeoutError:
            return


def _cost(claim: Claim) -> int:
    """Tokens in the budget; a job always counts."""
    return max(1, claim.job.tokens)
