"""Clients that leave in each phase: how many did, and how soon every engine had let go of their requests."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.faults.cluster import Cluster, eventually
from tests.faults.load import Load
from tests.faults.matrix import DEADLINE_S, SETTLE_S
from tests.faults.phases import Phase, where
from tests.faults.questions import Question
from tests.faults.shot import Outcome
from vllm_pd.state.base import Role

LONG_TOKENS = 600
"""So long an answer would keep a decode worker busy well beyond `LET_GO_S`."""
LET_GO_S = 10.0
"""Until no engine has a request any more whose client left; on a machine that has more to do than it can."""
_LEAVERS = 5
_OTHERS = 8
_GLANCE_S = 0.002
_ORDER = list(Phase)


@dataclass(slots=True)
class Aborts:
    """Phase to how many clients left in it, and the longest time in seconds until the engines had let go."""

    left: dict[str, int] = field(default_factory=dict)
    let_go_after: dict[str, float] = field(default_factory=dict)
    settled_after: float = 0.0
    wrongs: list[str] = field(default_factory=list)


def run_aborts(cluster: Cluster, questions: Sequence[Question], *, each: int, seconds: float) -> Aborts:
    """Let clients leave until `each` have in every phase, for at most `seconds`, while others are served."""
    found = Aborts(dict.fromkeys(Phase, 0), dict.fromkeys(Phase, 0.0))
    long = [replace(one, body={**one.body, "max_tokens": LONG_TOKENS}) for one in questions]
    traces = cluster.traces()
    decoders = frozenset(member.name for member in cluster.members if member.role is not Role.PREFILL)
    leavers = Load(cluster.router_url, cluster.model, long, clients=_LEAVERS, deadline_s=DEADLINE_S, label="leave")
    others = Load(
        cluster.router_url, cluster.model, questions, clients=_OTHERS, deadline_s=DEADLINE_S, label="stay", pinned=0
    )
    left_at: dict[str, tuple[Phase, float]] = {}
    gone_at: dict[str, float] = {}
    wishes: dict[str, Phase] = {}
    with leavers, others:
        end = time.monotonic() + seconds
        while time.monotonic() < end and (min(found.left.values()) < each or len(gone_at) < len(left_at)):
            traces.refresh()
            now = time.monotonic()
            for name in left_at.keys() - gone_at.keys():
                if all(phase == "gone" for phase in traces.of(name).values()):
                    gone_at[name] = now
            for shot in leavers.in_flight():
                if shot.name in left_at:
                    continue
                phase = where(traces.of(shot.name), decoders, has_streamed=bool(shot.first)).phase
                rarest = min(
                    (p for p in Phase if shot.stream == (p is Phase.STREAMING) or p not in _LAST),
                    key=found.left.__getitem__,
                )
                wish = wishes.setdefault(shot.name, rarest)
                # One that has passed its phase unseen leaves where it is.
                if _ORDER.index(phase) >= _ORDER.index(wish):
                    leavers.leave(shot.name)
                    left_at[shot.name] = phase, now
                    found.left[phase] += 1
            time.sleep(_GLANCE_S)
        leavers.leave_all()
    slow: dict[Phase, list[str]] = defaultdict(list)
    for name, (phase, at) in left_at.items():
        took = gone_at.get(name, float("inf")) - at
        found.let_go_after[phase] = max(found.let_go_after[phase], took)
        if took > LET_GO_S:
            slow[phase].append(f"{name} ({dict(traces.of(name))})")
    found.wrongs += [
        f"not let go of within {LET_GO_S:.0f} s, left {phase}: {', '.join(names)}" for phase, names in slow.items()
    ]
    found.wrongs += [f"nobody left {phase}" for phase, count in found.left.items() if not count]
    found.wrongs += [shot.describe() for shot in others.shots if shot.outcome is not Outcome.OK]
    ended = time.monotonic()
    if not eventually(lambda: not cluster.unsettled(), SETTLE_S):
        found.wrongs += cluster.unsettled()
    found.settled_after = time.monotonic() - ended
    return found


_LAST = (Phase.DECODING, Phase.STREAMING)
