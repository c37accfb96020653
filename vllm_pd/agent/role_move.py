"""How a worker's role changes: a state machine, pure. Times are the caller's monotonic seconds.

| it is | and then | it becomes |
|---|---|---|
| settled | a wish for a role that takes nothing away | that role, at once |
| settled | a wish for one that does | draining |
| draining | nothing of the kind that it leaves is under way, and routers had time to hear of it | the new role |
| draining | a part of the time is over | the same, and routers hand over what they can |
| draining | the wish is taken back, another one comes, the time is over | settled, as before |

A draining worker that leaves decoding gets no work at all, so that an idle engine says that its requests have ended.
One that leaves prefilling only, and decodes as before, has finished when its prefill jobs have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_pd.state.base import MoveState, Role, RoleMove
from vllm_pd.state.roles import WantedRole

DEFAULT_TIMEOUT_S = 30.0
"""Of a wish that names none."""
SETTLE_S = 1.0
"""From when the store has it until routers, which look twice a second, have heard that the worker drains."""
HAND_OVER_PART = 0.25
"""Of the timeout: for so long requests may finish where they are."""
BLOCKS_PART = 0.5
"""Of the timeout: for so long an idle worker waits for blocks that others have not read. They are in nobody's way, and
end by their own lease."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is under way on the worker now."""

    requests: int = 0
    """In its engines, running and waiting."""
    jobs: int = 0
    """Prefill jobs that it has claimed."""
    kv_usage: float = 0.0
    """Fraction of KV blocks in use; on an idle engine these are held for other workers."""

    def __str__(self) -> str:
        what = [f"{self.requests} requests"] if self.requests else []
        what += [f"{self.jobs} prefill jobs"] if self.jobs else []
        what += [f"{self.kv_usage:.1%} of its blocks"] if self.kv_usage > 0 else []
        return ", ".join(what) or "nothing"


@dataclass(frozen=True, slots=True)
class RoleState:
    """The role of a worker, and its newest change."""

    role: Role
    role_epoch: int = 0
    move: RoleMove | None = None
    began: float = 0.0
    timeout_s: float = 0.0
    told_at: float | None = None
    """Since when the store has it that the worker drains; None: it does not yet."""

    @property
    def moving_to(self) -> Role | None:
        """The role that it drains for."""
        return self.move.to if self.move is not None and self.move.state is MoveState.DRAINING else None

    @property
    def claims(self) -> bool:
        """Whether it may begin prefill jobs."""
        return self.role.prefills and self.moving_to is None

    @property
    def gives_jobs_away(self) -> bool:
        """Whether prefill jobs that wait for it are to go to others: while it drains it begins none, also where it is
        going to prefill again."""
        return self.moving_to is not None and self.role.prefills

    @property
    def leaves_decode(self) -> bool:
        return self.moving_to is not None and self.role.decodes and not self.moving_to.decodes

    @property
    def leaves_prefill(self) -> bool:
        return self.moving_to is not None and self.role.prefills and not self.moving_to.prefills

    def wish(self, wanted: WantedRole, now: float, now_ms: int) -> RoleState:
        """Obey a wish. One that it has obeyed already changes nothing.

        Args:
            now_ms: milliseconds since 1970, for people.
        """
        if self.move is not None and self.move.id == wanted.id:
            return self
        timeout_s = wanted.timeout_ms / 1000 or DEFAULT_TIMEOUT_S
        if self.moving_to is wanted.role and self.move is not None:
            # The same once more, by somebody else or for longer.
            return replace(
                self, move=replace(self.move, id=wanted.id, by=wanted.by), timeout_s=now - self.began + timeout_s
            )
        move = RoleMove(wanted.id, wanted.role, wanted.by, MoveState.DRAINING, now_ms)
        draining = RoleState(self.role, self.role_epoch, move, now, timeout_s)
        if draining.leaves_decode or draining.leaves_prefill:
            return draining
        return draining._done(now, now_ms)

    def told(self, now: float) -> RoleState:
        """The store has it as it is now."""
        return replace(self, told_at=now) if self.moving_to is not None and self.told_at is None else self

    def undo(self, why: str, now: float, now_ms: int) -> RoleState:
        """Go on in the role as before. Nothing but while it drains."""
        return self._end(MoveState.UNDONE, why, now, now_ms) if self.moving_to is not None else self

    def look(self, seen: Seen, now: float, now_ms: int) -> RoleState:
        """Whether it has drained, or the time is over."""
        if self.move is None or self.moving_to is None:
            return self
        waited = now - self.began
        left = self._left(seen, waited)
        if self.told_at is not None and now >= self.told_at + SETTLE_S and left is None:
            return self._done(now, now_ms)
        if waited >= self.timeout_s:
            return self.undo(self._why_late(left), now, now_ms)
        hand_over = self.move.hand_over or (self.leaves_decode and waited >= HAND_OVER_PART * self.timeout_s)
        return replace(self, move=replace(self.move, hand_over=hand_over, detail=f"waits for {left or 'routers'}"))

    def _why_late(self, left: Seen | None) -> str:
        if left is not None:
            return f"still under way after {self.timeout_s:g} s: {left}"
        if self.told_at is None:
            return f"the store did not hear of it within {self.timeout_s:g} s"
        return f"routers had no time to hear of it within {self.timeout_s:g} s"

    def _left(self, seen: Seen, waited: float) -> Seen | None:
        """What is still under way of the kind that it leaves; None when nothing is."""
        if self.role.decodes and not self.leaves_decode:
            return Seen(jobs=seen.jobs) if seen.jobs else None
        blocks = seen.kv_usage if waited < BLOCKS_PART * self.timeout_s else 0.0
        left = replace(seen, kv_usage=blocks)
        return left if left != Seen() else None

    def _done(self, now: float, now_ms: int) -> RoleState:
        assert self.move is not None
        ended = self._end(MoveState.DONE, "", now, now_ms)
        return replace(ended, role=self.move.to, role_epoch=self.role_epoch + (self.move.to is not self.role))

    def _end(self, state: MoveState, why: str, now: float, now_ms: int) -> RoleState:
        assert self.move is not None
        took_ms = round((now - self.began) * 1000)
        move = replace(self.move, state=state, since_ms=now_ms, took_ms=took_ms, detail=why, hand_over=False)
        return RoleState(self.role, self.role_epoch, move)


def differs(one: RoleMove | None, other: RoleMove | None) -> bool:
    """Whether there is something in it that others should hear of at once."""
    if one is None or other is None:
        return one is not other
    return replace(one, detail="", since_ms=0) != replace(other, detail="", since_ms=0)
