"""Decoding requests by the iterations in which something happens to them, so that those in between are one step."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from vllm_pd.sim.work import Work

_Heap = list[tuple[int, int, int, Work]]
"""(iteration, order, version, work). An entry of a request that has left since is of an older version."""


class Timetable:
    """Counts the iterations of one engine.

    Args:
        block_size: tokens.
    """

    def __init__(self, block_size: int) -> None:
        self.iteration = 0
        self._block_size = block_size
        self._order = itertools.count()
        self._needs: _Heap = []
        """Before which iteration a request needs one more block."""
        self._ends: _Heap = []

    def decodes(self, work: Work) -> None:
        """From now on it gets a token in each iteration."""
        work.since = self.iteration
        work.ends_at = self.iteration + work.output - work.generated
        heapq.heappush(self._ends, (work.ends_at, next(self._order), work.version, work))
        self.grows(work)

    def grows(self, work: Work) -> None:
        """Note when the blocks that it has will be full."""
        room = len(work.blocks) * self._block_size
        at = self.iteration + room + 1 - work.tokens
        if at < work.ends_at:
            heapq.heappush(self._needs, (at, next(self._order), work.version, work))

    def settle(self, work: Work) -> None:
        """Bring the counts of a decoding request up to this iteration."""
        gained = self.iteration - work.since
        work.generated += gained
        work.tokens += gained
        work.since = self.iteration
        work.computed = work.tokens - 1

    def ending(self) -> Iterator[Work]:
        """Requests that have their last token by now."""
        return self._due(self._ends)

    def needing(self) -> Iterator[Work]:
        """Requests whose next token begins a block."""
        return self._due(self._needs)

    def quiet(self) -> int:
        """How many iterations from now are alike: none ends and none needs a block."""
        heaps = [heap for heap in (self._ends, self._needs) if self._drop_stale(heap)]
        return min((heap[0][0] for heap in heaps), default=self.iteration + 1) - self.iteration

    def _due(self, heap: _Heap) -> Iterator[Work]:
        while heap and heap[0][0] <= self.iteration:
            _, _, version, work = heapq.heappop(heap)
            if version == work.version:
                yield work

    @staticmethod
    def _drop_stale(heap: _Heap) -> bool:
        while heap and heap[0][2] != heap[0][3].version:
            heapq.heappop(heap)
        return bool(heap)
