"""What this router serves, counted for planners, and told to them through the store every second.

Counting costs a fraction of a microsecond for each piece of an answer, whatever the size of the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Callable

from vllm_pd.errors import StoreError
from vllm_pd.router.directory import Directory
from vllm_pd.state.base import PoolId
from vllm_pd.state.demand import BOUNDS_S, DemandBoard, DemandReport, Spread

INTERVAL_S = 1.0
TTL_MS = 10_000
"""What a router that is gone has said last is forgotten after this long."""
DEADLINE_S = 1.0
_END = b"data: [DONE]\n\n"
_USAGE = b'"completion_tokens":'
_NO_CHOICE = b'"choices":[]'
"""In the event of a stream that only tells how many tokens there were."""
_DIGITS = b"0123456789"

_log = logging.getLogger(__name__)


class _Spread:
    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += times
        self.sum_s += seconds * times


class PoolTotals:
    """Of one pool since it was first heard of.

    Args:
        started_s: when that is, by the meter's clock.
    """

    __slots__ = (
        "answer_itl",
        "arrivals",
        "finished",
        "finished_output_tokens",
        "itl",
        "output_tokens",
        "prompt_tokens",
        "started_ms",
        "started_s",
        "ttft",
        "uncached_tokens",
    )

    def __init__(self, started_s: float = 0.0) -> None:
        self.started_ms = round(time.time() * 1000)
        self.started_s = started_s
        self.arrivals = self.finished = 0
        self.prompt_tokens = self.uncached_tokens = 0
        self.output_tokens = self.finished_output_tokens = 0
        self.ttft = _Spread()
        self.itl = _Spread()
        self.answer_itl = _Spread()


class Served:
    """One request, from its arrival to the end of its answer, whichever workers give it.

    Args:
        totals: where it is counted.
        preface: events of its stream before the first token: the one with the role, of a chat.
        clock: monotonic seconds.
    """

    __slots__ = ("_clock", "_gaps", "_gaps_s", "_last", "_preface", "_tokens", "_totals")

    def __init__(self, totals: PoolTotals, preface: int, clock: Callable[[], float]) -> None:
        self._totals = totals
        self._preface = preface
        self._clock = clock
        self._last = 0.0
        self._tokens = 0
        self._gaps = 0
        self._gaps_s = 0.0

    def begun(self, ttft_s: float | None) -> None:
        """The first byte of its answer has come; `ttft_s` where that is the first token of a stream."""
        if ttft_s is not None:
            self._totals.ttft.add(ttft_s)
        if not self._tokens:
            # Else another worker goes on with it, and the client has waited since the last token.
            self._last = self._clock()

    def events(self, chunk: bytes, tokens: int | None = None) -> None:
        """The next piece of its stream. Tokens that come together share the time since the last piece.

        Args:
            tokens: that are in it, where it says so; else each event is taken for one.
        """
        if tokens is None:
            tokens = self._events_with_tokens(chunk)
        if tokens <= 0:
            return
        now = self._clock()
        if self._tokens:
            took = now - self._last
            self._totals.itl.add(took / tokens, tokens)
            self._gaps += tokens
            self._gaps_s += took
        self._last = now
        self._tokens += tokens
        self._totals.output_tokens += tokens

    def _events_with_tokens(self, chunk: bytes) -> int:
        tokens = chunk.count(b"\n\n") - chunk.count(_NO_CHOICE)
        if chunk.endswith(_END):
            tokens -= 1
        if self._preface and tokens > 0:
            self._preface -= 1
            tokens -= 1
        return tokens

    def whole(self, body: bytes) -> None:
        """Its whole answer, which says itself how many tokens it has."""
        at = body.rfind(_USAGE)
        if at < 0:
            return
        text = body[at + len(_USAGE) : at + len(_USAGE) + 20].lstrip()
        digits = text[: len(text) - len(text.lstrip(_DIGITS))]
        if digits:
            self._tokens += int(digits)
            self._totals.output_tokens += int(digits)

    def ended(self) -> None:
        """Its answer is complete, or as far as it will be. Once. One whose length is not known has none."""
        if self._tokens:
            self._totals.finished += 1
            self._totals.finished_output_tokens += self._tokens
        if self._gaps:
            self._totals.answer_itl.add(self._gaps_s / self._gaps)


class DemandMeter:
    """Counts what one router serves.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pools: dict[PoolId, PoolTotals] = {}

    def arrived(self, pool: PoolId, prompt_tokens: int, uncached_tokens: int, *, chat: bool) -> Served:
        """Count a request that has come."""
        totals = self._totals(pool)
        totals.arrivals += 1
        totals.prompt_tokens += prompt_tokens
        totals.uncached_tokens += uncached_tokens
        return Served(totals, int(chat), self._clock)

    def keep_only(self, pools: set[PoolId]) -> None:
        """Forget pools that are gone."""
        for gone in set(self._pools) - pools:
            del self._pools[gone]

    def report(self, pool: PoolId, directory: Directory) -> DemandReport:
        """The totals of a pool as they are now; zeros for one that nothing was asked of."""
        totals = self._totals(pool)
        return DemandReport(
            started_ms=totals.started_ms,
            # The wall clock may jump, and rates are made of the differences.
            at_ms=totals.started_ms + round((self._clock() - totals.started_s) * 1000),
            arrivals=totals.arrivals,
            finished=totals.finished,
            prompt_tokens=totals.prompt_tokens,
            uncached_tokens=totals.uncached_tokens,
            output_tokens=totals.output_tokens,
            finished_output_tokens=totals.finished_output_tokens,
            ttft=Spread(tuple(totals.ttft.counts), totals.ttft.sum_s),
            itl=Spread(tuple(totals.itl.counts), totals.itl.sum_s),
            answer_itl=Spread(tuple(totals.answer_itl.counts), totals.answer_itl.sum_s),
            rates=directory.learned_rates(pool),
        )

    def _totals(self, pool: PoolId) -> PoolTotals:
        totals = self._pools.get(pool)
        if totals is None:
            totals = self._pools[pool] = PoolTotals(self._clock())
        return totals


class DemandPublisher:
    """Tells planners what this router serves, also that it is nothing: silence would be something else.

    Args:
        router: this router's id.
    """

    def __init__(self, board: DemandBoard, directory: Directory, meter: DemandMeter, router: str) -> None:
        self._board = board
        self._directory = directory
        self._meter = meter
        self._router = router

    async def refresh(self) -> None:
        """Publish. Never raises for a store that fails: the totals are told the next time."""
        pools = {workers[0].pool for workers in self._directory.pools}
        self._meter.keep_only(pools)
        for pool in pools:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    report = self._meter.report(pool, self._directory)
                    await self._board.publish(pool, self._router, report, TTL_MS)
            except (StoreError, TimeoutError, OSError) as e:
                _log.debug("what was served is not told: %s", e or "the store did not answer in time")
                return
