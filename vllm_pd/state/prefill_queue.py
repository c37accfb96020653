"""Values and Protocol of the prefill queue: jobs that any prefill worker may take, or that wait for a certain one.

Rules that every implementation keeps:
- A job is in one stream: that of a worker (affinity) or the shared one. Each stream is bounded. Whoever claims takes
  the job with the smallest `order` among the oldest of the streams that it looks at.
- A claimed job is its claimant's for as long as that says so in time (`extend`). After that anybody may give it up for
  the claimant (`reclaim`): it goes to the shared stream, or to the dead letters after its last attempt.
- What a claimant says about a claim that is no longer its own changes nothing and is answered with False. So a job has
  at most one result, however slow a worker was. A restarted worker is another claimant, and an older start of a
  worker that is registered anew gets no jobs.
- Jobs, results, dead letters and what routers say end by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from vllm_pd.errors import QueueFull
from vllm_pd.state.base import Epoch, PoolId, WorkerId

JobId = NewType("JobId", str)
"""Made by whoever puts the job, unique."""

RESULTS_A_CALL = 64


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Settings of a queue; the same for all who use it."""

    length: int = 1000
    """Most jobs in a stream, claimed ones included."""
    attempts: int = 3
    """How many times a job may be tried."""
    visibility_ms: int = 10_000
    """How long a claimant may say nothing about a job."""
    patience_ms: int = 1000
    """How long a job waits for somebody better: one that failed, for another worker than the one it failed on. And for
    how long smaller jobs overtake one that does not fit: after that, nothing that comes after it is claimed."""
    silence_ms: int = 10_000
    """A job this old whose router is not announced (any more) is dropped: nobody waits for it."""
    result_ttl_ms: int = 60_000
    dead_letters: int = 1000
    """About how many jobs that nobody could do are kept, for people, and for a day at most."""


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """What a router asks for."""

    id: JobId
    tokens: int
    """Prompt tokens to compute."""
    payload: bytes
    worker: WorkerId | None = None
    """Whose stream it waits in; None for the shared one."""
    order: int = 0
    """The smallest is claimed first, among equals the oldest. 64 bits: an engine's `priority`."""
    router: str = ""
    """Who waits for the result. Empty: nobody, and nobody needs to be announced for it."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """One start of a worker."""

    worker: WorkerId
    epoch: Epoch

    def __str__(self) -> str:
        return f"{self.worker}@{self.epoch}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A job in the hands of a worker."""

    job: PrefillJob
    """Its `worker` says which stream it was in."""
    claimant: Claimant
    attempt: int
    """1 for the first."""
    entry: str
    """Where it is in its stream. Opaque."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended: with `data`, or with the `error` of its last attempt."""

    data: bytes
    error: str = ""
    worker: str = ""
    """Who did it, or tried it last; empty if nobody did."""


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


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as a person looks at it."""

    id: JobId
    worker: WorkerId | None
    """Whose stream it is in; None for the shared one."""
    tokens: int
    order: int
    router: str
    age_ms: int
    """Since it was put."""
    left_ms: int
    """Until it is dropped, if nothing happens."""
    attempt: int
    """How often it was claimed."""
    claimant: str
    """Who has it (`worker@epoch`); empty while it waits."""


class PrefillQueue(Protocol):
    """Deadlines and errors as for `Registry`. Where a method takes `worker` or None, None names the shared stream."""

    async def put(self, pool: PoolId, job: PrefillJob, ttl_ms: int) -> bool:
        """Add a job, which is dropped if nobody claimed it within its time to live.

        Returns False, changing nothing, when a job of that id is there or has ended (also by `cancel`, whichever of the
        two comes first): putting it again after a timeout is safe.

        Raises:
            QueueFull: the stream has `QueueLimits.length` jobs.
        """

    async def claim(
        self, pool: PoolId, claimant: Claimant, *, fits: int, steal_from: WorkerId | None = None, wait_ms: int = 0
    ) -> Claim | None:
        """The job with the smallest `order` among the oldest 64 waiting ones of the worker's own stream and of the
        shared one, in that order among equals; if they have none, then of the stream of `steal_from`.

        Args:
            fits: only a job of at most so many tokens; any, if negative.
            wait_ms: how long to wait for a job to come to the first two streams, if there is none that fits.
        """

    async def extend(self, pool: PoolId, claim: Claim) -> bool:
        """Say that the job makes progress. False: it is no longer this claimant's; stop working on it."""

    async def ack(self, pool: PoolId, claim: Claim, result: bytes) -> bool:
        """The job is done. Saying it again is answered alike for as long as the result is kept."""

    async def fail(self, pool: PoolId, claim: Claim, error: str) -> bool:
        """The attempt failed: another one, or the dead letters and a result with this error."""

    async def release(self, pool: PoolId, claim: Claim) -> bool:
        """Give a job back that was not begun: it goes to the shared stream, and no attempt is counted."""

    async def cancel(self, pool: PoolId, job: JobId, error: str = "") -> bool:
        """Forget a job. Its claimant hears so (`cancelled`, and its next call about the claim). It has no result,
        unless an `error` is given for whoever waits. Returns whether it was there."""

    async def cancelled(self, pool: PoolId, claimant: Claimant, wait_ms: int = 0) -> Sequence[JobId]:
        """Jobs that were cancelled in the claimant's hands, each named at least once; 64 at most. Waits up to
        `wait_ms` for one. For one caller per claimant."""

    async def reclaim(self, pool: PoolId, worker: WorkerId | None) -> int:
        """Give up claims in a stream about which nothing was said for too long; returns how many, 64 a call at most."""

    async def takeover(self, pool: PoolId, worker: WorkerId, epoch: Epoch) -> int:
        """At a worker's start: what its earlier starts have claimed, in any stream, is given up. What waits for it
        stays. Returns how many jobs (64 a call at most)."""

    async def rehome(self, pool: PoolId, worker: WorkerId, *, claims: bool = True) -> int:
        """For a worker that is gone: what waits in its stream goes to the shared one, and what it has claimed, in any
        stream, is given up. Returns how many jobs (64 of each kind a call at most).

        `claims`: False for a worker that takes no more jobs but finishes those that it has.
        """

    async def announce_router(self, pool: PoolId, router: str, ttl_ms: int) -> None:
        """A router says that it lives and waits for its jobs' results."""

    async def results(self, pool: PoolId, router: str, wait_ms: int = 0) -> Sequence[tuple[JobId, JobResult]]:
        """What ended of a router's jobs, each named at least once (again after an error); 64 at most. Waits up to
        `wait_ms` for one. For one caller per router."""

    async def depth(self, pool: PoolId, workers: Sequence[WorkerId]) -> Mapping[WorkerId | None, QueueDepth]:
        """The shared stream (None) and those of the workers."""

    async def streams(self, pool: PoolId) -> Sequence[WorkerId]:
        """The workers in whose streams there is something, or that have claimed something, sorted."""

    async def jobs(self, pool: PoolId, limit: int = 100) -> Sequence[JobInfo]:
        """The oldest jobs of each stream, at most `limit` over all; the shared stream first."""

    async def peek(self, pool: PoolId, job: JobId) -> tuple[JobInfo, bytes] | None:
        """A job and its payload; None when it has ended or never was."""

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
