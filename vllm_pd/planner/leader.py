"""Which of several planners decides: leases in the store, one for each pool, and how long this planner's are good for.

A leadership counts as ended here before the store can give it to another planner: the time it takes to be renewed is
counted against it, and so is the time that this process or its machine stood still.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from vllm_pd.errors import DeposedError, StoreError
from vllm_pd.state.base import PoolId
from vllm_pd.state.planner_board import Leader, PlannerBoard

_PARTS = 3
"""A lease is renewed so many times while it lasts."""
_LAST_PART = 0.1
"""Of a lease: what is begun then might end after it."""
_SOON_S = 0.02
_LONGEST_SLEEP_S = 1.0

_log = logging.getLogger(__name__)


def steady_s() -> float:
    """Seconds that never go back and that pass also while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True, slots=True)
class Led:
    """A leadership of this planner."""

    term: int
    ends_s: float
    """By the caller's clock."""


@dataclass(slots=True)
class _Pool:
    led: Led | None = None
    other: str = ""
    """Who else leads."""
    due_s: float = 0.0
    """When to ask again."""
    clock: tuple[float, float] = (0.0, 0.0)
    """The store's time in seconds, and ours when it was asked."""
    lost_s: float | None = None
    """When it was seen that the store had forgotten a leadership of ours."""
    acts_in: int = 0
    """Term in which what is begun now was decided; 0 for none."""


class Leadership:
    """Stands for the pools that it is told, and keeps what it has won.

    Args:
        planner: id of this planner.
        lease_s: after so long without a renewal another planner leads.
        clock: seconds; see `steady_s`.
    """

    def __init__(
        self, board: PlannerBoard, planner: str, lease_s: float, clock: Callable[[], float] = steady_s
    ) -> None:
        self.planner = planner
        self._board = board
        self._lease_s = lease_s
        self._clock = clock
        self._pools: dict[PoolId, _Pool] = {}
        self._wake = asyncio.Event()

    def stand_for(self, pools: Collection[PoolId]) -> None:
        """These pools, and no others. What was won of others is left to end."""
        if set(pools) - set(self._pools):
            self._wake.set()
        self._pools = {pool: self._pools.get(pool) or _Pool() for pool in pools}

    def led(self, pool: PoolId) -> Led | None:
        """The leadership of a pool, if there is time left in it to begin something."""
        kept = self._pools.get(pool)
        if kept is None or kept.led is None:
            return None
        return kept.led if kept.led.ends_s - self._clock() > _LAST_PART * self._lease_s else None

    def leads(self, pool: PoolId) -> bool:
        """Whether this planner leads a pool now, if only for a moment."""
        kept = self._pools.get(pool)
        return kept is not None and kept.led is not None and kept.led.ends_s > self._clock()

    def act_in(self, pool: PoolId, term: int) -> None:
        """What is begun for a pool from now on was decided in this term, and must not be begun in another."""
        self._pools.setdefault(pool, _Pool()).acts_in = term

    def term(self, pool: PoolId) -> int:
        """Number of the leadership in which what is begun now was decided; 0 for none. See `mandate.Mandate`."""
        kept = self._pools.get(pool)
        return kept.acts_in if kept is not None else 0

    async def confirm(self, pool: PoolId) -> int:
        """`term`, once the store has said that it is still that of the leader. Waits a part of a lease at most.

        Raises:
            DeposedError: it is not, or the store did not say.
        """
        term, led, asked_s = self.term(pool), self.led(pool), self._clock()
        if not term or led is None or led.term != term:
            raise DeposedError("This planner does not lead any more, or cannot be sure that it does.")
        try:
            async with asyncio.timeout(self._lease_s / _PARTS):
                leader = await self._board.leader(pool)
        except (StoreError, TimeoutError) as e:
            why = str(e) or "it took too long"
            raise DeposedError(f"Whether this planner still leads could not be asked: {why}") from None
        if leader is None or (leader.planner, leader.term) != (self.planner, term):
            raise DeposedError(f"{leader.planner if leader else 'Nobody'} leads pool {pool} by now.")
        # It may have stood still since it asked.
        if leader.left_ms / 1000 - (self._clock() - asked_s) <= _LAST_PART * self._lease_s:
            raise DeposedError("The leadership of this planner is about to end, so nothing is begun.")
        return term

    def other(self, pool: PoolId) -> str:
        """Who else led the pool when the store was last asked; "" for nobody."""
        kept = self._pools.get(pool)
        return kept.other if kept is not None else ""

    def forgotten_s(self, pool: PoolId) -> float | None:
        """How long ago the store had forgotten a leadership of ours, and so perhaps everything; None if never."""
        kept = self._pools.get(pool)
        return self._clock() - kept.lost_s if kept is not None and kept.lost_s is not None else None

    def store_time_s(self, pool: PoolId) -> float:
        """Seconds since 1970 by the store's clock, which all planners share."""
        store_s, own_s = self._pools[pool].clock
        return store_s + self._clock() - own_s

    async def run(self) -> None:
        """Stand and renew until cancelled. Never raises for a store that fails."""
        while True:
            for pool in list(self._pools):
                kept = self._pools.get(pool)
                if kept is not None and self._clock() >= kept.due_s:
                    try:
                        await self.stand(pool)
                    except StoreError as e:
                        _log.debug("who leads pool %s is not known: %s", pool, e)
                    except Exception:
                        # Nobody foresaw it; without renewal this planner would lead no more, ever.
                        _log.exception("who leads pool %s could not be asked", pool)
            due_s = min((kept.due_s for kept in self._pools.values()), default=self._clock() + _LONGEST_SLEEP_S)
            self._wake.clear()
            try:
                async with asyncio.timeout(min(_LONGEST_SLEEP_S, max(_SOON_S, due_s - self._clock()))):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def stand(self, pool: PoolId) -> None:
        """Try to lead a pool, or renew. Raises StoreError; what was won before lasts to its end then."""
        kept = self._pools.setdefault(pool, _Pool())
        asked_s = self._clock()
        kept.due_s = asked_s + self._lease_s / _PARTS
        answer = await self._board.lead(pool, self.planner, round(self._lease_s * 1000))
        kept.clock = (answer.now_ms / 1000, self._clock())
        self._take(pool, kept, answer, asked_s)

    def _take(self, pool: PoolId, kept: _Pool, answer: Leader, asked_s: float) -> None:
        before = kept.led
        if answer.planner == self.planner:
            kept.led, kept.other = Led(answer.term, asked_s + self._lease_s), ""
            if before is None or before.term != answer.term:
                _log.info("this planner (%s) leads pool %s, term %d", self.planner, pool, answer.term)
        else:
            kept.led, kept.other = None, answer.planner
            # Just when that one's lease ends, if it does.
            kept.due_s = min(kept.due_s, asked_s + answer.left_ms / 1000 + _SOON_S)
            if before is not None:
                _log.warning("pool %s is led by planner %s now", pool, answer.planner)
        if before is not None and before.ends_s > self._clock() and (kept.led is None or kept.led.term != before.term):
            kept.lost_s = self._clock()

    async def resign(self) -> None:
        """Let others lead at once. Never raises for a store that fails: the leases end by themselves."""
        await asyncio.gather(*(self._resign(pool, kept) for pool, kept in self._pools.items()))

    async def _resign(self, pool: PoolId, kept: _Pool) -> None:
        led, kept.led = kept.led, None
        if led is None:
            return
        try:
            await self._board.resign(pool, self.planner, led.term)
        except StoreError as e:
            _log.debug("the leadership of pool %s is left to end: %s", pool, e)
