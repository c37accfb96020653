"""Which worker takes a request: the least loaded of its role. Pure functions over read-only views."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vllm_pd.state.base import PoolId, Role, WorkerId

WAITING_WEIGHT = 4
"""A waiting request delays the next one by its whole prefill, a running one only shares steps with it."""


class Selectable(Protocol):
    """What selection looks at. All counts are requests."""

    @property
    def id(self) -> WorkerId: ...
    @property
    def pool(self) -> PoolId: ...
    @property
    def role(self) -> Role: ...
    @property
    def inflight(self) -> int:
        """This router's own requests on the worker now."""

    @property
    def inflight_at_report(self) -> int:
        """`inflight` when the newest load report arrived: those are in the report already."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def last_pick(self) -> int:
        """Grows with every pick; the smallest was picked longest ago."""


W = TypeVar("W", bound=Selectable)


@dataclass(frozen=True, slots=True)
class Pair(Generic[W]):
    """The decode worker and, where one exists, a prefill worker of the same pool that is not the decode worker."""

    decode: W
    prefill: W | None


def cost(worker: Selectable) -> tuple[int, float, int, int]:
    """Smaller is better. Ties of the load fall to KV use, then own requests, then the one picked longest ago.

    A report lags: what this router started or finished since it arrived is added or taken off, and the worker never
    counts less than this router's own requests on it.
    """
    inflight, waiting = worker.inflight, worker.waiting
    occupied = worker.running + waiting + inflight - worker.inflight_at_report
    if occupied < inflight:
        occupied = inflight
    return (occupied + (WAITING_WEIGHT - 1) * waiting, round(worker.kv_usage, 2), inflight, worker.last_pick)


def _cheapest(workers: list[W]) -> W | None:
    return min(workers, key=cost) if len(workers) > 1 else workers[0] if workers else None


def pick_decode(workers: Iterable[W], exclude: Collection[WorkerId] = ()) -> W | None:
    """The cheapest worker that decodes and is not excluded."""
    return _cheapest([w for w in workers if w.role.decodes and w.id not in exclude])


def pick_prefill(workers: Iterable[W], pool: PoolId, exclude: Collection[WorkerId] = ()) -> W | None:
    """The cheapest worker of `pool` that prefills and is not excluded."""
    return _cheapest([w for w in workers if w.role.prefills and w.pool == pool and w.id not in exclude])


def pick_pair(workers: Sequence[W]) -> Pair[W] | None:
    """The cheapest decode worker with the cheapest prefill worker of its pool; None when nothing decodes."""
    decode = pick_decode(workers)
    if decode is None:
        return None
    return Pair(decode, pick_prefill(workers, decode.pool, (decode.id,)))
