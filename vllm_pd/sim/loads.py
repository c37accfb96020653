"""Loads of KV that are under way into a modelled engine: from its lower tiers, and from other workers."""

from __future__ import annotations

import heapq
import itertools

from vllm_pd.sim.work import Work

_INSTANT = 1e-9


class Loads:
    """Times are the engine's seconds."""

    def __init__(self) -> None:
        self._under_way: list[tuple[float, int, Work]] = []
        """(end, order, work)"""
        self._order = itertools.count()
        self._link_free = 0.0
        """When the loads from lower tiers that are under way will be done: they share one link."""

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def next_end(self) -> float | None:
        return self._under_way[0][0] if self._under_way else None

    def start(self, work: Work, until: float) -> None:
        """It will be there at `until`."""
        work.loading = True
        heapq.heappush(self._under_way, (until, next(self._order), work))

    def start_on_link(self, work: Work, now: float, seconds: float) -> None:
        """It takes so long from when the link of the lower tiers is free."""
        self._link_free = max(self._link_free, now) + seconds
        self.start(work, self._link_free)

    def drop(self, work: Work) -> None:
        """Nobody waits for it any more."""
        self._under_way = [load for load in self._under_way if load[2] is not work]
        heapq.heapify(self._under_way)

    def ended(self, now: float) -> list[Work]:
        """Those that are there by `now`, in the order of their ends; each is told once."""
        done: list[Work] = []
        while self._under_way and self._under_way[0][0] <= now + _INSTANT:
            work = heapq.heappop(self._under_way)[2]
            work.loading = False
            done.append(work)
        return done
