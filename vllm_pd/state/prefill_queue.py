"""Values and Protocol of the prefill queue: jobs that any prefill worker may take, or that wait for a certain one.

Rules that every implementation keeps:
- A job is in one stream: that of a worker (affinity) or the shared one. Each stream is in order of arrival and bounded.
- A claimed job is its worker's for as long as the worker says so in time (`extend`). After that anybody may give it up
  for the worker (`reclaim`): it goes to the end of the shared stream, or to the dead letters after its last attempt.
- What a worker says about a claim that is no longer its own changes nothing and is answered with False. So a job has at
  most one result, however slow a worker was.
- Jobs, results and dead letters end by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from vllm_pd.errors import QueueFull
from vllm_pd.state.base import PoolId, WorkerId

JobId = NewType("JobId", str)
"""Made by whoever puts the job, unique."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Settings of a queue; the same for all who use it."""

    length: int = 1000
    """Most jobs in a stream, claimed ones included."""
    attempts: int = 3
    """How many workers may try a job."""
    visibility_ms: int = 10_000
    """How long a worker may say nothing about a job that it claimed."""
    result_ttl_ms: int = 60_000
    dead_letters: int = 1000
    """About how many jobs that nobody could do are kept, for people, and for a day at most."""


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """What a router asks for."""

    id: JobId
    tokens: int
    """Prompt tokens to compute, for `depth`."""
    payload: bytes
    worker: WorkerId | None = None
    """Whose stream it waits in; None for the shared one."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job in the hands of a worker."""

    job: PrefillJob
    """Its `worker` says which stream it was in."""
    claimant: WorkerId
    attempt: int
    """1 for the first."""
    entry: str
    """Where it is in its stream. Opaque."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended: with `data`, or with the `error` of its last attempt."""

    data: bytes
    error: str = ""


@dataclass(frozen=True, slots=True)
class DeadJob:
    """A job that was given up after its last attempt."""

    id: JobId
    tokens: int
    attempts: int
    error: str


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """What is in one stream."""

    waiting: int = 0
    waiting_tokens: int = 0
    claimed: int = 0
    claimed_tokens: int = 0


class PrefillQueue(Protocol):
    """Deadlines and errors as for `Registry`. Where a method takes `worker`, None names the shared stream."""

    async def put(self, pool: PoolId, job: PrefillJob, ttl_ms: int) -> bool:
        """Add a job, which is dropped if nobody claimed it within its time to live.

        Returns False, changing nothing, when a job of that id is there or has a result: putting it again after a
        timeout is safe.

        Raises:
            QueueFull: the stream has `QueueLimits.length` jobs.
        """

    async def claim(
        self, pool: PoolId, worker: WorkerId, *, steal_from: WorkerId | None = None, wait_ms: int = 0
    ) -> Claim | None:
        """The oldest job of the worker's own stream, else of the shared one, else of the stream of `steal_from`.

        Waits up to `wait_ms` for one to come to the first two. None when there was none.
        """

    async def extend(self, pool: PoolId, claim: Claim) -> bool:
        """Say that the job makes progress. False: it is no longer this worker's; stop working on it."""

    async def ack(self, pool: PoolId, claim: Claim, result: bytes) -> bool:
        """The job is done."""

    async def fail(self, pool: PoolId, claim: Claim, error: str) -> bool:
        """The attempt failed: another one, or the dead letters and a result with this error."""

    async def cancel(self, pool: PoolId, job: JobId) -> bool:
        """Forget a job. A worker that has it hears so from its next call. Returns whether it was there."""

    async def reclaim(self, pool: PoolId, worker: WorkerId | None) -> int:
        """Give up claims in a stream whose workers said nothing for too long; returns how many (64 a call at most)."""

    async def rehome(self, pool: PoolId, worker: WorkerId) -> int:
        """For a worker that is gone: what waits in its stream goes to the shared one, and what it had claimed of
        that is given up. Returns how many jobs (64 a call at most)."""

    async def depth(self, pool: PoolId, workers: Sequence[WorkerId]) -> Mapping[WorkerId | None, QueueDepth]:
        """The shared stream (None) and those of the workers."""

    async def wait_done(self, pool: PoolId, job: JobId, wait_ms: int) -> JobResult | None:
        """The job's result, waiting up to `wait_ms` for it. It stays until its time to live is over."""

    async def dead(self, pool: PoolId, limit: int = 100) -> Sequence[DeadJob]:
        """The newest dead letters, newest first."""

    async def close(self) -> None:
        """Release connections. Idempotent."""


def full_queue(job: PrefillJob, limits: QueueLimits) -> QueueFull:
    """The error of a job that finds no room."""
    where = f"of {job.worker}" if job.worker is not None else "that all workers share"
    return QueueFull(
        f"The prefill queue {where} has {limits.length} jobs; add prefill workers, or let the decode worker prefill."
    )
