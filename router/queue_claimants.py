"""The workers that have had this router's jobs for a while, watched like those of any other leg.

The store gives jobs of a silent worker to others after some time that suits the slowest engine. The health watch knows
sooner that a process is stopped; then its jobs are given away at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_pd.router.breaker import Circuit, Trouble
from vllm_pd.router.directory import Directory
from vllm_pd.router.watched_legs import NO_ENGINE, Leg, Legs, always
from vllm_pd.state.base import WorkerId
from vllm_pd.state.prefill_queue import JobId, JobInfo

SUSPECT_S = 1.0
"""A result that has not come after so long: time to know who has the job."""
REFUSES_S = 1.0
"""Longer than the news takes that a worker has withdrawn."""


class Claimants:
    """Of one pool's queue. Belongs to one event loop."""

    def __init__(self, directory: Directory, legs: Legs) -> None:
        self._directory = directory
        self._legs = legs
        self._watched: dict[JobId, Leg] = {}

    def look(self, overdue: Iterable[JobId], found: Iterable[JobInfo], now: float) -> set[WorkerId]:
        """The workers that were found down with a job in their hands.

        Args:
            overdue: jobs whose results are waited for.
            found: what the queue says; those among `overdue` that are claimed count.
            now: the directory's monotonic seconds.
        """
        wanted = set(overdue)
        held = {job.id: WorkerId(job.claimant.rpartition("@")[0]) for job in found if job.id in wanted and job.claimant}
        for job, leg in list(self._watched.items()):
            if held.get(job) != leg.worker.id:
                self._end(job)
        for job, worker in held.items():
            known = self._directory.get(worker)
            if known is not None and job not in self._watched:
                # Which engine computes is not known, and its own worker sees whether it gets on.
                leg = self._watched[job] = self._legs.begin(known, NO_ENGINE, always)
                leg.wait.since = leg.sent
        lost = {job: leg.worker.id for job, leg in self._watched.items() if self._is_lost(leg, now)}
        for job in lost:
            self._end(job)
        return set(lost.values())

    def _is_lost(self, leg: Leg, now: float) -> bool:
        if leg.wait.error is not None:
            return True
        # Whoever leaves withdraws before it closes its port: one that is registered and takes no connections is dead.
        breaker, worker = leg.worker.breaker, leg.worker
        refuses = breaker.circuit is Circuit.OPEN and breaker.trouble is Trouble.REFUSED
        return refuses and now - breaker.since >= REFUSES_S and self._directory.get(worker.id) is worker

    def close(self) -> None:
        """Watch nobody any more. Idempotent."""
        for job in list(self._watched):
            self._end(job)

    def _end(self, job: JobId) -> None:
        self._legs.end(self._watched.pop(job))
