"""Runs cells of the fault matrix and keeps what they showed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.faults.cluster import Cluster, Member, eventually
from tests.faults.injections import FULL, Fault, Pace, Target, allowed, plan, repair
from tests.faults.load import Load
from tests.faults.phases import Phase, Traces, Where, where
from tests.faults.questions import Question
from tests.faults.shot import Outcome, Shot
from vllm_pd.errors import PDError
from vllm_pd.state.base import Role

CLIENTS = 20
DEADLINE_S = 60.0
"""What no request may take, whatever happens to whom."""
SETTLE_S = 45.0
"""After the last answer everything must be free again. What a decode worker may still be reading when it falls silent
is free when its lease of 30 s has ended, and not before."""
AFTERWARDS = 6
"""Requests that must be right when everything runs again."""
_WARM = 12
_LOOK_S = 2.0
_HUNT_S = 8.0
_GLANCE_S = 0.002


@dataclass(slots=True)
class Row:
    """What one cell of the matrix showed. Times are seconds."""

    target: str
    fault: str
    requests: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    """Phase at the blow to how many requests in it ended how."""
    hit: int = 0
    """Requests that a struck worker had at the blow."""
    slowest: float = 0.0
    longest_stall: float = 0.0
    settled_after: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    """What requests that were not answered were told."""
    wrongs: list[str] = field(default_factory=list)
    """What must not be."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_row(
    cluster: Cluster,
    target: Target,
    fault: Fault,
    questions: Sequence[Question],
    seed: int,
    *,
    clients: int = CLIENTS,
    pace: Pace = FULL,
    at_least: int = 0,
) -> Row:
    """One cell: load, the blow at a moment with requests in as many phases as can be, the load on, and the checks.

    Args:
        at_least: so many requests are sent, as far as `DEADLINE_S` allows.
    """
    row = Row(target, fault)
    label = f"{target}{list(Fault).index(fault)}"
    try:
        _strike(row, cluster, target, fault, questions, seed, label, clients, pace, at_least)
        ended = time.monotonic()
        if not eventually(lambda: not cluster.unsettled(), SETTLE_S):
            row.wrongs += [f"not as before {SETTLE_S:.0f} s after the last answer: {each}" for each in _left(cluster)]
        row.settled_after = time.monotonic() - ended
    except (AssertionError, PDError, OSError) as e:
        row.wrongs.append(f"{type(e).__name__}: {e}")
    try:
        repair(cluster)
        row.wrongs += _afterwards(cluster, questions, label)
    except (AssertionError, PDError, OSError) as e:
        row.wrongs.append(f"afterwards: {type(e).__name__}: {e}")
    return row


def _strike(
    row: Row,
    cluster: Cluster,
    target: Target,
    fault: Fault,
    questions: Sequence[Question],
    seed: int,
    label: str,
    clients: int,
    pace: Pace,
    at_least: int,
) -> None:
    traces = cluster.traces()
    load = Load(
        cluster.router_url, cluster.model, questions, clients=clients, deadline_s=DEADLINE_S, label=label, seed=seed
    ).start()
    at_blow: dict[str, Where] = {}
    victims: frozenset[str] = frozenset()
    try:
        assert eventually(lambda: sum(bool(shot.ended) for shot in list(load.shots)) >= _WARM, DEADLINE_S), "no answers"
        injection = plan(cluster, target, fault, _victim(cluster, target, load, traces), pace)
        victims = injection.victims
        at_blow = _hunt(cluster, load, traces, victims)
        injection.strike()
        for delay, action in injection.then:
            time.sleep(delay)
            action()
        eventually(lambda: len(load.shots) >= at_least, DEADLINE_S)
    finally:
        _judge(row, target, fault, load.stop(), at_blow, victims)


def _victim(cluster: Cluster, target: Target, load: Load, traces: Traces) -> Member | None:
    """The worker of that role that has most to do."""
    if target not in (Target.PREFILL, Target.DECODE):
        return None
    seen = _snapshot(cluster, load, traces)
    return max(
        cluster.of_role(Role(target)), key=lambda member: sum(member.name in each.workers for each in seen.values())
    )


def _snapshot(cluster: Cluster, load: Load, traces: Traces) -> dict[str, Where]:
    decoders = frozenset(member.name for member in cluster.members if member.role is not Role.PREFILL)
    traces.refresh()
    return {
        shot.name: where(traces.of(shot.name), decoders, has_streamed=bool(shot.first)) for shot in load.in_flight()
    }


def _hunt(cluster: Cluster, load: Load, traces: Traces, victims: frozenset[str]) -> dict[str, Where]:
    """Look on for a while, then return at the first moment that is as good as the best seen."""

    def worth(seen: dict[str, Where]) -> tuple[bool, int]:
        hit = {each.phase for each in seen.values() if each.workers & victims}
        return bool(hit) or not victims, len({each.phase for each in seen.values()}) + len(hit)

    started, best = time.monotonic(), (True, 0)
    while True:
        seen = _snapshot(cluster, load, traces)
        if not traces.files:
            return seen
        value, waited = worth(seen), time.monotonic() - started
        if (waited > _LOOK_S and value >= best) or waited > _HUNT_S:
            return seen
        best = max(best, value)
        time.sleep(_GLANCE_S)


def _judge(
    row: Row, target: Target, fault: Fault, shots: list[Shot], at_blow: dict[str, Where], victims: frozenset[str]
) -> None:
    row.requests = len(shots)
    row.outcomes = dict(Counter(str(shot.outcome) for shot in shots))
    row.hit = sum(bool(each.workers & victims) for each in at_blow.values())
    served = [shot for shot in shots if shot.outcome is Outcome.OK]
    row.slowest = max((shot.ended - shot.sent for shot in shots), default=0.0)
    row.longest_stall = max((shot.stall for shot in served), default=0.0)
    row.reasons = dict(Counter(_reason(shot) for shot in shots if shot.outcome not in (Outcome.OK, Outcome.LEFT)))
    for phase in Phase:
        names = {name for name, each in at_blow.items() if each.phase is phase}
        row.phases[phase] = dict(Counter(str(shot.outcome) for shot in shots if shot.name in names))
    for shot in shots:
        found = at_blow.get(shot.name)
        if not allowed(target, fault, shot, found.phase if found else None):
            place = f"{found.phase}, on {', '.join(sorted(found.workers)) or 'no worker'}" if found else "sent later"
            row.wrongs.append(f"{shot.describe()} [{place}; victims {', '.join(sorted(victims)) or 'none'}]")


def _reason(shot: Shot) -> str:
    said = shot.error or shot.problem
    return f"{shot.status or 'no status'}: {said[:160]}"


def _left(cluster: Cluster) -> list[str]:
    try:
        return cluster.unsettled()
    except OSError as e:
        return [f"somebody does not answer ({e})"]


def _afterwards(cluster: Cluster, questions: Sequence[Question], label: str) -> list[str]:
    load = Load(
        cluster.router_url, cluster.model, questions, clients=2, deadline_s=DEADLINE_S, pinned=0, label=f"{label}z"
    ).start()
    try:
        assert eventually(lambda: sum(bool(shot.ended) for shot in list(load.shots)) >= AFTERWARDS, 2 * DEADLINE_S)
    finally:
        shots = load.stop()
    return [f"afterwards: {shot.describe()}" for shot in shots if shot.outcome is not Outcome.OK]
