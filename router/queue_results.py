"""This router's jobs in the prefill queue of one pool: who waits for which result, and the loop that brings them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from vllm_pd.errors import StoreError
from vllm_pd.state.base import PoolId
from vllm_pd.state.prefill_queue import RESULTS_A_CALL, JobId, JobResult, PrefillQueue

WAIT_MS = 500
"""Of one call. With the store's deadline it bounds how long a silent store goes unnoticed."""
RETRY_S = 0.1
LOST_S = 1.0
"""After so long without an answer of the store nobody waits for a result any more: the work is sent directly."""
REMEMBERED_S = 300.0
"""Longer than an abandoned job can still be running."""
MOST_REMEMBERED = 65_536
CHECKED = 10_000
"""Jobs that are looked at after the store was away; with more in the queue each waits for its own deadline."""

_log = logging.getLogger(__name__)


class Expected:
    """A job whose result somebody waits for.

    Attributes:
        result: None if none will come.
        queued: the store has said that it has the job.
    """

    __slots__ = ("hold", "id", "queued", "result", "since")

    def __init__(self, id: JobId, hold: str, since: float) -> None:
        self.id = id
        self.since = since
        self.hold = hold
        """Key of the blocks that its worker will keep."""
        self.queued = False
        self.result: asyncio.Future[JobResult | None] = asyncio.get_running_loop().create_future()


class JobResults:
    """One blocking call at a time brings the results of all jobs.

    Args:
        router: id under which the jobs are put.
        orphaned: called with the hold and the result of a job that was abandoned and finished all the same.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        queue: PrefillQueue,
        pool: PoolId,
        router: str,
        orphaned: Callable[[str, JobResult], None],
        clock: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._pool = pool
        self._router = router
        self._orphaned = orphaned
        self._clock = clock
        self._waiting: dict[JobId, Expected] = {}
        self._abandoned: dict[JobId, tuple[str, float]] = {}
        """Job -> its hold, and when it is forgotten; in the order of the latter."""
        self._answered_at = clock()
        self.problem = ""
        """Why the store did not answer the last time."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def expect(self, job: JobId, hold: str) -> Expected:
        """Before it is put, so that no result comes too early. `done` must follow."""
        expected = self._waiting[job] = Expected(job, hold, self._clock())
        return expected

    def done(self, expected: Expected, *, abandoned: bool) -> None:
        """Nobody waits for it any more. `abandoned`: it may be in the queue still."""
        self._waiting.pop(expected.id, None)
        if not abandoned:
            return
        now = self._clock()
        self._abandoned[expected.id] = (expected.hold, now + REMEMBERED_S)
        for _ in range(2):
            oldest = next(iter(self._abandoned))
            if self._abandoned[oldest][1] > now and len(self._abandoned) <= MOST_REMEMBERED:
                break
            del self._abandoned[oldest]

    def overdue(self, seconds: float) -> list[JobId]:
        """Jobs in the queue whose results have been waited for that long."""
        latest = self._clock() - seconds
        return [each.id for each in self._waiting.values() if each.queued and each.since <= latest]

    def lose(self) -> None:
        """Whoever waits is told that no result will come."""
        _lose(self._waiting.values())

    async def lose_unclaimed(self) -> None:
        """Nobody claims any more: whoever waits for a job that nobody has is told so.

        Raises:
            StoreError: the store did not answer.
        """
        queued = [expected for expected in self._waiting.values() if expected.queued]
        if queued:
            claimed = {info.id for info in await self._queue.jobs(self._pool, CHECKED) if info.claimant}
            _lose(expected for expected in queued if expected.id not in claimed)

    async def refresh(self) -> None:
        """Wait once for results. Never raises for a store that fails."""
        try:
            self._arrived(await self._queue.results(self._pool, self._router, WAIT_MS))
            if self.problem:
                await self._after_outage()
        except (StoreError, OSError) as e:
            self._failed(str(e) or type(e).__name__)
            await asyncio.sleep(RETRY_S)
        except Exception:
            # Nobody foresaw it; it is asked again, but not without pause.
            await asyncio.sleep(RETRY_S)
            raise
        else:
            self._answered_at = self._clock()

    def _failed(self, problem: str) -> None:
        if not self.problem:
            _log.warning("results of the prefill queue do not come: %s", problem)
        self.problem = problem
        if self._clock() - self._answered_at >= LOST_S:
            self.lose()

    async def _after_outage(self) -> None:
        """A store that came back empty has forgotten jobs: whoever waits for one of those is told."""
        suspects = [expected for expected in self._waiting.values() if expected.queued]
        if suspects:
            known = await self._queue.jobs(self._pool, CHECKED)
            present = {info.id for info in known}
            suspects = [each for each in suspects if each.id not in present] if len(known) < CHECKED else []
        for _ in range(CHECKED // RESULTS_A_CALL):
            # What is not there any more may have ended.
            found = await self._queue.results(self._pool, self._router)
            if not found:
                break
            self._arrived(found)
        _lose(suspects)
        _log.info("results of the prefill queue come again")
        self.problem = ""

    def _arrived(self, results: Sequence[tuple[JobId, JobResult]]) -> None:
        for job, result in results:
            expected = self._waiting.get(job)
            if expected is not None:
                if not expected.result.done():
                    expected.result.set_result(result)
                continue
            # A result may come twice: only those that were abandoned have nobody to read their blocks.
            left = self._abandoned.pop(job, None)
            if left is not None:
                self._orphaned(left[0], result)


def _lose(jobs: Iterable[Expected]) -> None:
    """Tell whoever waits for one of these that no result will come."""
    for expected in jobs:
        if not expected.result.done():
            expected.result.set_result(None)
