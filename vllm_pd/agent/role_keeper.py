"""Carries out what is wished of a worker's role: the only one that does, and the only one that writes its record.

It belongs to the agent's thread. The store may be away in mid-move: what routers have heard of goes on by the worker's
own clock and is told when the store is back; what they have not heard of is undone in time.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from vllm_pd.agent.role_move import RoleState, Seen
from vllm_pd.state.base import MoveState, RoleMove, WorkerRecord
from vllm_pd.state.roles import Roles, WantedRole

logger = logging.getLogger("vllm.vllm_pd")

POLL_S = 0.5
"""How often it looks for a wish."""


class RoleKeeper:
    """The role of one worker. All methods are for one loop.

    Args:
        record: the worker as it started.
        roles: not closed by this.
        ended: called with each move that has ended.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        record: WorkerRecord,
        roles: Roles,
        ended: Callable[[RoleMove], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = RoleState(record.role, record.role_epoch, record.move)
        self._worker, self._pool, self._epoch = record.id, record.pool.id, record.epoch
        self._roles = roles
        self._ended = ended
        self._clock = clock
        self._next_poll = 0.0
        self.wish_may_be_lost = False
        """The store was emptied in mid-move: that there is no wish does not say that it was taken back."""
        self._unwanted: str | None = None
        """Id of a wish that could not be fulfilled and is still in the store."""

    @property
    def draining(self) -> bool:
        return self.state.moving_to is not None

    def write_into(self, record: WorkerRecord) -> WorkerRecord:
        """The record as others are to read it now."""
        state = self.state
        return dataclasses.replace(record, role=state.role, role_epoch=state.role_epoch, move=state.move)

    def told(self) -> None:
        """The store has the record as `write_into` made it last."""
        self.state = self.state.told(self._clock())

    def store_was_empty(self) -> None:
        """The worker's record was not there."""
        self.wish_may_be_lost = self.draining

    async def ask(self) -> bool:
        """Look for a wish, if it is time to. Returns whether the one that is being carried out may have been taken
        back: `taken_back` if the worker's record is still in the store. Raises StoreError."""
        now = self._clock()
        if now < self._next_poll:
            return False
        if self._unwanted is not None:
            await self._roles.clear(self._pool, self._worker, self._epoch, self._unwanted)
            self._unwanted = None
        wanted = await self._roles.of(self._pool, self._worker)
        self._next_poll = now + POLL_S
        if wanted is None or wanted.epoch != self._epoch:
            return self.draining and wanted is None and not self.wish_may_be_lost
        self.wish_may_be_lost = False
        self._obey(wanted)
        return False

    def taken_back(self) -> None:
        """Nobody wishes any more what is being carried out."""
        self._become(self.state.undo("the wish was taken back", *self._now()))

    def look(self, seen: Seen) -> None:
        """Whether it has drained, or the time is over."""
        self._become(self.state.look(seen, *self._now()))

    def _obey(self, wanted: WantedRole) -> None:
        before = self.state
        after = before.wish(wanted, *self._now())
        if before.move is not None and before.moving_to not in (None, wanted.role):
            why = f"{wanted.by or 'somebody'} has wished for another role"
            self._tell(before.undo(why, *self._now()).move)
        self.state = after
        if after.move is not before.move and (after.moving_to is not None or after.role is not before.role):
            self._tell(after.move)

    def _become(self, after: RoleState) -> None:
        before, self.state = self.state, after
        if before.moving_to is not None and after.moving_to is None and after.move is not None:
            self._tell(after.move)
            if after.move.state is MoveState.UNDONE:
                # As long as it is there, nobody counts on this worker in its role.
                self._unwanted = after.move.id
                self._next_poll = 0.0

    def _tell(self, move: RoleMove | None) -> None:
        assert move is not None
        by = move.by or "nobody in particular"
        if move.state is MoveState.DRAINING:
            logger.info("vllm-pd: %s wishes this worker to be %s, so it drains.", by, move.to)
            return
        if move.state is MoveState.DONE:
            logger.info("vllm-pd: this worker is %s, as %s wished, after %.1f s.", move.to, by, move.took_ms / 1000)
        else:
            logger.warning("vllm-pd: this worker does not become %s, as %s wished: %s", move.to, by, move.detail)
        self._ended(move)

    def _now(self) -> tuple[float, int]:
        return self._clock(), time.time_ns() // 1_000_000
