"""Asking for a worker's role to be changed: the one way that the command line, the router's endpoint and planners use.

Asking leaves a wish in the store and nothing else. The worker's agent finds it, carries it out and tells of it in the
worker's record, so whoever asked may die at any moment. A worker that a person moved is held: planners leave it alone
until that is taken back (`to=None`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vllm_pd.errors import SettingsError, StoreError
from vllm_pd.layered import nearest
from vllm_pd.planner.model import PLANNER
from vllm_pd.state.base import (
    Epoch,
    MoveState,
    Registry,
    Role,
    RoleMove,
    WorkerId,
    WorkerRecord,
    WorkerState,
)
from vllm_pd.state.roles import Roles, WantedRole, Wished

OPERATOR = "operator"
"""Who wishes by hand, as workers repeat it."""
NOBODY = ""
"""Who wishes that anybody may move the worker again."""

DEFAULT_TIMEOUT_S = 30.0
"""After which a move that has not finished is undone."""
LONGEST_TIMEOUT_S = 3600.0
_WISH_SLACK_S = 60.0
"""By how much a wish outlives its move: until then everybody has read the worker's new record."""
_TAKE_UP_S = 15.0
"""Longer than an agent takes to find a wish, and than a lease: a worker that is gone by then never will."""
_POLL_S = 0.2

_NAMES = {Role.PREFILL: "prefills", Role.DECODE: "decodes"}


class Verdict(StrEnum):
    """What became of asking."""

    ASKED = "asked"
    ALREADY = "already"
    """It does that already, or is on its way, and was asked for by the same author."""
    UNKNOWN = "unknown"
    """No such worker is registered, or not this start of it."""
    HELD = "held"
    """A person has asked for the role that it has, or that it is to have."""
    DEPOSED = "deposed"
    """Another planner decides about its pool by now."""
    UNABLE = "unable"
    """It cannot do that kind of work."""
    LAST = "last"
    """Nobody of some kind would be left."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The answer to `request_move`."""

    verdict: Verdict
    detail: str
    """One sentence: what was asked for, or why it was not."""
    record: WorkerRecord | None = None
    """The worker as it was then."""
    wish: WantedRole | None = None
    """To wait for with `wait_for_move`; None where nothing is under way."""

    @property
    def ok(self) -> bool:
        """Whether the worker is, or is going to be, what was asked for."""
        return self.verdict in (Verdict.ASKED, Verdict.ALREADY)


@dataclass(frozen=True, slots=True)
class Moved:
    """How a move that was asked for ended."""

    done: bool
    detail: str
    """One sentence."""
    move: RoleMove | None = None
    """As the worker tells it; None when it tells nothing."""


def is_held(record: WorkerRecord) -> bool:
    """Whether the worker's role was asked for by hand and is not to be changed by a planner. Also where that could not
    be done: somebody is at it."""
    return record.move is not None and record.move.by not in (NOBODY, PLANNER)


async def request_move(
    registry: Registry,
    roles: Roles,
    worker: str,
    to: Role | None,
    *,
    by: str = OPERATOR,
    term: int = 0,
    epoch: Epoch | None = None,
    timeout_s: float = 0.0,
    force: bool = False,
) -> Asked:
    """Wish that a worker changes its role, and return at once. Idempotent: what is under way is not asked for again.

    Args:
        worker: its id (`host:port`) or its URL.
        to: the role; None: let planners move it again.
        by: who asks.
        term: of the planner's leadership, where a planner asks: the store refuses one that was deposed.
        epoch: only this start of it.
        timeout_s: after which the move is undone unless it has finished; 0: `DEFAULT_TIMEOUT_S`.
        force: also if nobody who prefills, or decodes, is left in its pool.

    Raises:
        SettingsError: the timeout or the author's name is out of bounds.
        StoreError: the store did not answer; whether the wish is there is not known then. Asking again is safe.
    """
    timeout_ms = _milliseconds(timeout_s)
    if ":" in by:
        raise SettingsError(f"Who asks for a role must be named without a colon, not {by!r}.")
    workers = (await registry.snapshot()).workers
    state = next((each for each in workers if worker.rstrip("/") in (each.record.id, each.record.url)), None)
    if state is None:
        known = [str(each.record.id) for each in workers]
        return Asked(Verdict.UNKNOWN, f"No worker {worker!r} is registered{nearest(worker, known)}.")
    record = state.record
    if epoch is not None and record.epoch != epoch:
        return Asked(Verdict.UNKNOWN, f"Worker {record.id} has been started anew meanwhile; ask again.", record)
    held = Asked(Verdict.HELD, f"Worker {record.id} is held in its role by hand (`vllm-pd role`).", record)
    if by == PLANNER and is_held(record):
        return held
    role = to if to is not None else record.moving_to or record.role
    author = by if to is not None else NOBODY
    if role is Role.PREFILL and not record.can_transfer:
        problem = f"Worker {record.id} cannot prefill for others, since NIXL is off there; start it with NIXL."
        return Asked(Verdict.UNABLE, problem, record)
    pool = record.pool.id
    there = await roles.of(pool, record.id)
    if (already := _already(record, role, author, there)) is not None:
        return already
    wish = WantedRole(role, record.epoch, secrets.token_hex(8), author, timeout_ms)
    # Where it is on its way there, somebody was left when that began, and is held there by the wish that there is.
    on_its_way = there is not None and there.epoch == record.epoch and there.role is role is record.moving_to
    stays = {} if force or on_its_way else _who_stays(workers, record, role)
    ttl_ms = timeout_ms + int(_WISH_SLACK_S * 1000)
    answer = await roles.set_unless_last(pool, record.id, wish, ttl_ms, stays, term=term if by == PLANNER else None)
    if answer is Wished.HELD:
        return held
    if answer is Wished.DEPOSED:
        problem = f"Worker {record.id} was not asked, since another planner leads pool {pool} by now."
        return Asked(Verdict.DEPOSED, problem, record)
    if answer is Wished.OLD:
        return Asked(Verdict.UNKNOWN, f"Worker {record.id} has been started anew meanwhile; ask again.", record)
    if answer is Wished.LAST:
        kinds = " or ".join(_NAMES[kind] for kind in stays)
        problem = (
            f"Worker {record.id} is the last of its pool that {kinds}, or the others are on their way to something "
            "else; add one, wait, or force it."
        )
        return Asked(Verdict.LAST, problem, record)
    asked = "planners may move it again" if to is None else f"to {role}, within {timeout_ms / 1000:g} s"
    return Asked(Verdict.ASKED, f"Worker {record.id} was asked: {asked}.", record, wish)


async def take_back(roles: Roles, record: WorkerRecord, wish: WantedRole) -> bool:
    """Take back what `request_move` has asked for: a move that has not ended is undone. Whether the wish was there.

    Raises:
        StoreError: the store did not answer.
    """
    return await roles.clear(record.pool.id, record.id, record.epoch, wish.id)


async def wait_for_move(registry: Registry, record: WorkerRecord, wish: WantedRole) -> Moved:
    """Wait until the worker tells the end of the move; in any case not much longer than its timeout. Never raises for a
    store that does not answer."""
    seen_at, problem = time.monotonic(), ""
    deadline = seen_at + wish.timeout_ms / 1000 + _TAKE_UP_S
    move: RoleMove | None = None
    while time.monotonic() < deadline:
        try:
            state = await registry.find(record.id, record.pool.id)
            problem = ""
        except StoreError as e:
            state, problem = None, str(e)
        if state is not None and state.record.epoch != record.epoch:
            return Moved(False, f"Worker {record.id} was started anew in mid-move, in the role {state.record.role}.")
        if state is not None or problem:
            seen_at = time.monotonic()
        if state is not None:
            before, move = move, state.record.move
            if move is not None and move.id == wish.id:
                if move.state is not MoveState.DRAINING:
                    return _told(record, move)
            elif before is not None and before.id == wish.id and move is not None:
                return _replaced(move)
        elif time.monotonic() - seen_at > _TAKE_UP_S:
            return Moved(False, f"Worker {record.id} is gone.", move)
        await asyncio.sleep(_POLL_S)
    if problem:
        return Moved(False, f"The store does not answer, so how it ended is not known: {problem}", move)
    if move is not None and move.id not in (wish.id, record.move.id if record.move is not None else None):
        return _replaced(move)
    if move is None or move.id != wish.id:
        return Moved(False, f"Worker {record.id} has not taken up the wish; is its vllm-pd older than this one?", move)
    return Moved(False, f"Worker {record.id} has not told the end of the move.", move)


def _milliseconds(timeout_s: float) -> int:
    if not 0 <= timeout_s <= LONGEST_TIMEOUT_S:
        raise SettingsError(f"The timeout of a move must be 0 to {LONGEST_TIMEOUT_S:g} seconds, got {timeout_s:g}.")
    return int((timeout_s or DEFAULT_TIMEOUT_S) * 1000)


def _already(record: WorkerRecord, role: Role, by: str, there: WantedRole | None) -> Asked | None:
    """The answer where nothing needs to be asked for."""
    move = record.move
    author = move.by if move is not None else NOBODY
    taken_up = there is not None and move is not None and move.id == there.id
    if there is not None and not taken_up and there.epoch == record.epoch:
        if there.role is not role or there.by != by:
            # It is replaced by this one.
            return None
        return Asked(Verdict.ALREADY, f"Worker {record.id} has been asked to be {role} already.", record, there)
    if record.moving_to is not None:
        if record.moving_to is not role or author != by:
            return None
        return Asked(Verdict.ALREADY, f"Worker {record.id} is on its way to {role} already.", record, there)
    if record.role is not role or (author != by and by != PLANNER):
        return None
    return Asked(Verdict.ALREADY, f"Worker {record.id} is {role} already.", record)


def _who_stays(
    workers: Iterable[WorkerState], record: WorkerRecord, role: Role
) -> dict[Role, Sequence[tuple[WorkerId, Epoch]]]:
    """For each kind of work that the worker would leave: who else does it."""
    others = [each.record for each in workers if each.record.pool.id == record.pool.id and each.record.id != record.id]
    stays: dict[Role, Sequence[tuple[WorkerId, Epoch]]] = {}
    for kind in (Role.PREFILL, Role.DECODE):
        if _does(record, record.role, kind) and not _does(record, role, kind):
            stays[kind] = [
                (other.id, other.epoch)
                for other in others
                if _does(other, other.role, kind) and (other.moving_to is None or _does(other, other.moving_to, kind))
            ]
    return stays


def _does(record: WorkerRecord, role: Role, kind: Role) -> bool:
    """Whether the worker does this kind of work in that role: prefill (for others) or decode."""
    return role.prefills and record.can_transfer if kind is Role.PREFILL else role.decodes


def _replaced(move: RoleMove) -> Moved:
    return Moved(False, f"Another wish has taken its place: to {move.to}, by {move.by or 'nobody'}.", move)


def _told(record: WorkerRecord, move: RoleMove) -> Moved:
    if move.state is MoveState.DONE:
        return Moved(True, f"Worker {record.id} is {move.to}, after {move.took_ms / 1000:.1f} s.", move)
    return Moved(False, f"Worker {record.id} stays {record.role}: {move.detail}", move)
