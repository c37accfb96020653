"""The legs that are under way, as the health watch sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_pd.router.transport import UpstreamError, Wait
from vllm_pd.router.worker import Worker

NO_ENGINE = -1
"""Rank of a leg for which only the process of its worker is watched."""


def always() -> bool:
    """For a leg that can be done in another way at any time."""
    return True


class Leg:
    """One leg of a request on a worker, from before it is sent until its answer has ended.

    Attributes:
        wait: goes to `Upstream.open`; the watch ends it with `WorkerDown` or `SourceDown`.
        movable: asked when the worker is found down: whether another worker can take the request now. A leg that
            cannot be moved gets a longer time, as its worker may come back.
        reads: it is the part of another leg that reads KV from this worker, which knows nothing of it. That may be over
            without anybody saying so, so it ends only if it is movable.
        begun: the engine has computed something for it: the first byte of its answer's body has come.
    """

    __slots__ = ("begun", "movable", "rank", "reads", "sent", "source", "wait", "worker")

    def __init__(self, worker: Worker, rank: int, sent: float, movable: Callable[[], bool]) -> None:
        self.worker = worker
        self.rank = rank
        """Data-parallel rank of its engine."""
        self.sent = sent
        """Seconds of the running loop's clock."""
        self.movable = movable
        self.reads = False
        self.source: Leg | None = None
        """The leg on the worker that this one reads from."""
        self.begun = False
        self.wait = Wait()


class Legs:
    """All legs of one router. Belongs to one event loop.

    Args:
        clock: seconds of that loop.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._legs: dict[Worker, set[Leg]] = {}
        self._stopped: UpstreamError | None = None

    def begin(self, worker: Worker, rank: int, movable: Callable[[], bool]) -> Leg:
        """A leg is about to be sent. `end` must follow."""
        leg = Leg(worker, rank, self._clock(), movable)
        if self._stopped is not None:
            leg.wait.end(self._stopped)
        self._legs.setdefault(worker, set()).add(leg)
        return leg

    def begin_read(self, leg: Leg, source: Worker, movable: Callable[[], bool]) -> None:
        """`leg` is about to read KV from `source`. Until `end_read`, or its end, it fails if `source` is found down.

        Args:
            movable: asked then: whether the request can be computed anew.
        """
        read = leg.source = Leg(source, NO_ENGINE, leg.sent, movable)
        read.reads, read.wait = True, leg.wait
        self._legs.setdefault(source, set()).add(read)

    def end_read(self, leg: Leg) -> None:
        """What `leg` reads has come. Idempotent."""
        read, leg.source = leg.source, None
        if read is not None:
            self.end(read)

    def end(self, leg: Leg) -> None:
        """It has ended, in whatever way. Idempotent."""
        self.end_read(leg)
        legs = self._legs.get(leg.worker)
        if legs is not None:
            legs.discard(leg)
            if not legs:
                del self._legs[leg.worker]

    def stop(self, error: UpstreamError) -> None:
        """End all legs with `error`, and whatever begins from now on."""
        self._stopped = error
        for legs in list(self._legs.values()):
            for leg in list(legs):
                leg.wait.end(error)

    @property
    def by_worker(self) -> Mapping[Worker, set[Leg]]:
        """Workers with legs under way; those that have left the directory among them."""
        return self._legs
