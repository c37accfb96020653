"""What one look shows, with what the planner remembers: who is there, what is under way, what is unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.memory import AskedMove, AskedRemoval, AskedStart, Memory, Refused
from vllm_pd.planner.model import GiveUp, PoolView, WorkerView
from vllm_pd.state.base import Role, WorkerId

_JUMP_STEPS = 10
"""More steps than this between two looks are a jump of the clock, or a planner that was away: no time to act upon."""
_UNSEEN_STEPS = 6
"""Steps after which a wish that its worker has not obeyed is taken for lost."""
_LEFT_ALONE = 10
"""Cooldowns for which a worker that did not do what it was asked is left alone."""
_LEARN = 0.3
_LONGEST_PAUSE = 3600.0
"""Seconds, between starts that keep failing."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Workers are counted by what they will be when what is under way has ended."""

    memory: Memory
    elapsed_s: float
    prefill: tuple[WorkerView, ...] = ()
    decode: tuple[WorkerView, ...] = ()
    both: tuple[WorkerView, ...] = ()
    moving: frozenset[WorkerId] = frozenset()
    """Workers that change their role or go away just now, or were asked to."""
    starting: Mapping[Role, int] = field(default_factory=dict)
    give_up: tuple[GiveUp, ...] = ()
    blind: str = ""
    """Why nothing can be decided; "" when it can."""
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Workers that are there or on their way."""
        return len(self.prefill) + len(self.decode) + len(self.both) + sum(self.starting.values())

    def count(self, role: Role) -> int:
        """Workers of exactly this role, those on their way included."""
        there = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.both}[role]
        return len(there) + self.starting.get(role, 0)


def look(view: PoolView, memory: Memory, config: PlannerConfig) -> Sight:
    """Bring the memory up to this view and say what can be seen."""
    elapsed, jump = _elapsed(view, memory, config)
    memory = replace(memory, clock=memory.clock + elapsed, last_at=view.at_s)
    if view.age_s > config.stale_s:
        return Sight(memory, elapsed, blind=f"the list of workers is {view.age_s:.0f} s old")
    memory, moved = _follow_moves(view, memory, config)
    memory, left = _follow_removals(view, memory, config)
    memory, started, give_up, starting = _follow_starts(view, memory, config)
    memory, vanished = _follow_workers(view, memory, config)
    if took := [worker.startup_s for worker in view.workers if worker.startup_s is not None]:
        memory = replace(memory, startup_s=median(took))
    wanted = {move.worker: move.to for move in memory.asked_moves}
    by_role: dict[Role, list[WorkerView]] = {role: [] for role in Role}
    moving = set(wanted)
    going = {removal.worker for removal in memory.asked_removals}
    for worker in view.workers:
        if worker.draining or worker.id in going:
            moving.add(worker.id)
            continue
        if worker.moving_to is not None:
            moving.add(worker.id)
        by_role[worker.moving_to or wanted.get(worker.id, worker.role)].append(worker)
    blind = jump or vanished
    if not view.workers and not blind:
        blind = "no worker is known"
    return Sight(
        memory,
        elapsed,
        tuple(by_role[Role.PREFILL]),
        tuple(by_role[Role.DECODE]),
        tuple(by_role[Role.BOTH]),
        frozenset(moving),
        starting,
        give_up,
        blind,
        (*moved, *left, *started),
    )


def _elapsed(view: PoolView, memory: Memory, config: PlannerConfig) -> tuple[float, str]:
    """Seconds to count since the step before, and what is wrong with the clock."""
    if memory.last_at is None:
        return 0.0, ""
    passed = view.at_s - memory.last_at
    if passed < 0:
        return config.interval_s, f"the clock went back by {-passed:.0f} s"
    if passed > _JUMP_STEPS * config.interval_s:
        return config.interval_s, f"{passed:.0f} s have passed since the step before, or the clock jumped"
    return passed, ""


def _follow_moves(view: PoolView, memory: Memory, config: PlannerConfig) -> tuple[Memory, list[str]]:
    there = {worker.id: worker for worker in view.workers}
    kept: list[AskedMove] = []
    refused = [each for each in memory.refused if each.until > memory.clock]
    notes: list[str] = []
    move_s = memory.move_s
    for move in memory.asked_moves:
        worker = there.get(move.worker)
        if worker is None or worker.epoch != move.epoch:
            notes.append(f"{move.worker}, which was to become {move.to}, is gone or was restarted.")
        elif worker.moving_to == move.to:
            kept.append(replace(move, seen=True))
        elif worker.moving_to is None and worker.role == move.to:
            took = max(memory.clock - move.at, 0.0)
            move_s = took if move_s is None else move_s + _LEARN * (took - move_s)
            notes.append(f"{move.worker} is {move.to} now, {took:.0f} s after it was asked.")
        elif move.seen or worker.moving_to is not None or memory.clock - move.at > _UNSEEN_STEPS * config.interval_s:
            why = "did not become" if move.seen else "was not seen to become"
            refused.append(Refused(move.worker, memory.clock + _LEFT_ALONE * config.cooldown_s))
            notes.append(
                f"{move.worker} {why} {move.to}; it is left alone for {_LEFT_ALONE * config.cooldown_s:.0f} s."
            )
        else:
            kept.append(move)
    return replace(memory, asked_moves=tuple(kept), refused=tuple(refused), move_s=move_s), notes


def _follow_removals(view: PoolView, memory: Memory, config: PlannerConfig) -> tuple[Memory, list[str]]:
    there = {worker.id: worker for worker in view.workers}
    kept: list[AskedRemoval] = []
    refused = list(memory.refused)
    notes: list[str] = []
    for removal in memory.asked_removals:
        worker = there.get(removal.worker)
        if worker is None or worker.epoch != removal.epoch:
            continue
        if worker.draining or memory.clock - removal.at <= _UNSEEN_STEPS * config.interval_s:
            kept.append(removal)
            continue
        refused.append(Refused(removal.worker, memory.clock + _LEFT_ALONE * config.cooldown_s))
        notes.append(f"{removal.worker}, which was to be taken away, is still at work; it is left alone for a while.")
    return replace(memory, asked_removals=tuple(kept), refused=tuple(refused)), notes


def _follow_starts(
    view: PoolView, memory: Memory, config: PlannerConfig
) -> tuple[Memory, list[str], tuple[GiveUp, ...], dict[Role, int]]:
    known = set(memory.workers)
    # With no memory of who was there, nobody is new.
    came = Counter(worker.role for worker in view.workers if worker.id not in known) if known else Counter[Role]()
    notes: list[str] = []
    give_up: list[GiveUp] = []
    kept: list[AskedStart] = []
    start_s, failed, pause = memory.start_s, memory.failed_starts, memory.no_start_before
    for start in memory.asked_starts:
        arrived = min(start.count, came[start.role])
        waited = memory.clock - start.at
        if arrived:
            came[start.role] -= arrived
            start_s = waited if start_s is None else start_s + _LEARN * (waited - start_s)
            failed, pause = 0, 0.0
            notes.append(f"{_workers(arrived, start.role)} came up {waited:.0f} s after the start was asked for.")
        missing = start.count - arrived
        if not missing:
            continue
        if waited > config.start_deadline_s:
            # What was asked for together fails together: that is one failure.
            if pause <= memory.clock:
                failed += 1
                pause = memory.clock + min(_LONGEST_PAUSE, config.start_deadline_s * 2 ** min(failed - 1, 10))
            why = f"{_workers(missing, start.role)} did not come up in {waited:.0f} s."
            give_up.append(GiveUp(start.role, missing, why))
            notes.append(f"{why} Nothing is started for {pause - memory.clock:.0f} s.")
        else:
            kept.append(replace(start, count=missing))
    starting = Counter[Role]()
    for start in kept:
        starting[start.role] += start.count
    for seen in view.starts:
        if seen.for_s <= config.start_deadline_s:
            starting[seen.role] = max(starting[seen.role], seen.count)
        elif seen.count and not give_up:
            notes.append(
                f"{_workers(seen.count, seen.role)} that others asked for {seen.for_s:.0f} s ago did not come up "
                "and are not counted on."
            )
    if came.total():
        notes.append(f"{came.total()} workers came that were not asked for; what they are for is left to who did.")
        memory = replace(memory, needs=(), needs_since=None)
    memory = replace(memory, asked_starts=tuple(kept), start_s=start_s, failed_starts=failed, no_start_before=pause)
    return memory, notes, tuple(give_up), {role: count for role, count in starting.items() if count > 0}


def _follow_workers(view: PoolView, memory: Memory, config: PlannerConfig) -> tuple[Memory, str]:
    """A list that suddenly lacks most workers is more likely a store that came back empty than so many deaths."""
    ids = tuple(worker.id for worker in view.workers)
    lost = len(set(memory.workers) - set(ids))
    if lost <= max(1, len(memory.workers) // 2):
        return replace(memory, workers=ids, vanished_at=None), ""
    since = memory.clock if memory.vanished_at is None else memory.vanished_at
    if memory.clock - since > config.stale_s:
        return replace(memory, workers=ids, vanished_at=None), ""
    return (
        replace(memory, vanished_at=since),
        f"{lost} of {len(memory.workers)} workers vanished at once, which may be a store that lost its list",
    )


def _workers(count: int, role: Role) -> str:
    return f"{count} {role} worker{'s' * (count != 1)}"


def known_loads(workers: Sequence[WorkerView], config: PlannerConfig) -> tuple[WorkerView, ...]:
    """Those whose load was reported lately."""
    return tuple(
        worker
        for worker in workers
        if worker.running is not None
        and worker.kv_usage is not None
        and (worker.load_age_s is None or worker.load_age_s <= config.stale_s)
    )
