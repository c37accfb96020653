"""One worker as this router sees it: what it says about itself, its load, and how connections to it fare."""

from __future__ import annotations

from enum import StrEnum

from vllm_pd.state.base import PoolId, Role, WorkerId, WorkerRecord, WorkerState

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0


class Source(StrEnum):
    """How the router knows the worker."""

    STORE = "store"
    STATIC = "static"


class Worker:
    """Mutable, owned by the `Directory`; satisfies `selection.Selectable`. Times are the caller's monotonic seconds."""

    __slots__ = (
        "_lease_end",
        "_pause",
        "_reported_at",
        "id",
        "inflight",
        "inflight_at_report",
        "kv_usage",
        "last_pick",
        "lease_span",
        "pool",
        "record",
        "resume_at",
        "role",
        "running",
        "source",
        "waiting",
    )

    def __init__(self, state: WorkerState, source: Source, now: float) -> None:
        self.id: WorkerId = state.record.id
        self.source = source
        self.inflight = 0
        self.inflight_at_report = 0
        self.last_pick = 0
        self.resume_at = 0.0
        self._pause = FIRST_PAUSE_S
        self._reported_at: tuple[int, ...] = ()
        self.record: WorkerRecord = state.record
        self.pool: PoolId = state.record.pool.id
        self.role: Role = state.record.role
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.lease_span = 0.0
        """What was left of the lease, in seconds, when the worker was last seen alive."""
        self._lease_end = 0.0
        self.update(state, now)

    @property
    def url(self) -> str:
        return self.record.url

    def update(self, state: WorkerState, now: float) -> None:
        """Take over a newer state of the same worker. A new epoch is a new process: old failures do not count."""
        if state.record.epoch != self.record.epoch:
            self.note_success()
        if state.record is not self.record:
            self.record = state.record
            self.pool = state.record.pool.id
            self.role = state.record.role
        self.lease_span = state.lease_left_ms / 1000
        self._lease_end = now + self.lease_span
        reported_at = tuple(load.at_ms for load in state.loads.values())
        if reported_at != self._reported_at:
            self._reported_at = reported_at
            self.inflight_at_report = self.inflight if reported_at else 0
            self.running, self.waiting, self.kv_usage = state.running, state.waiting, state.kv_usage

    def lease_left_ms(self, now: float) -> int:
        """What is left of the lease as last seen, not below 0."""
        return max(0, int((self._lease_end - now) * 1000))

    def note_failure(self, now: float) -> None:
        """A connection was refused: leave the worker out for a time that doubles with each failure in a row.

        Requests that meet the same outage side by side, or ask as a last resort during the pause, count once.
        """
        if self.is_paused(now):
            return
        self.resume_at = now + self._pause
        self._pause = min(LONGEST_PAUSE_S, 2 * self._pause)

    def note_success(self) -> None:
        """It answered."""
        if self.resume_at:
            self._pause = FIRST_PAUSE_S
            self.resume_at = 0.0

    def is_paused(self, now: float) -> bool:
        """Whether it refused a connection a short time ago."""
        return now < self.resume_at
