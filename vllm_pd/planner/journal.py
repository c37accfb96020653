"""A step as it is kept in the store and shown to people: what was decided, why, and what came of it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from vllm_pd.planner.actuators.wire import as_json
from vllm_pd.planner.metrics import Did, Verdict
from vllm_pd.planner.model import Action, GiveUp, Plan

AT_LEAST_EVERY_S = 60.0
"""A step is written to the journal at least this often, also where it says the same as the one before."""
_FIGURES = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Done:
    """One thing that was decided, and what came of it."""

    action: str
    """`move`, `add`, `remove` or `give_up`."""
    role: str = ""
    """Of a move the new one."""
    worker: str = ""
    count: int = 0
    why: str = ""
    did: str = ""
    """A `Did`; "" for what was decided and has not been begun."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a planner."""

    pool: str
    at_s: float
    """Seconds since 1970, by the store's clock."""
    planner: str
    term: int
    kind: str
    """A `metrics.Verdict`."""
    verdict: str
    """One sentence."""
    reasons: tuple[str, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)
    done: tuple[Done, ...] = ()
    dry_run: bool = False
    repeated: int = 0
    """How many steps before this one said the same and are not in the journal."""

    @property
    def is_open(self) -> bool:
        """Whether what came of it is not told: its planner ended in the middle of it."""
        return any(not each.did for each in self.done)


def encode_step(step: Step) -> bytes:
    return msgspec.json.encode(step)


def decode_steps(entries: Iterable[bytes | None]) -> list[Step]:
    """Those that can be read; another version may have written others. One whose writing was answered too late may have
    been written once more."""
    steps, before = [], b""
    for entry in entries:
        try:
            if entry and entry != before:
                steps.append(_decoder.decode(entry))
                before = entry
        except msgspec.DecodeError:
            continue
    return steps


_decoder = msgspec.json.Decoder(Step)


def kind_of(plan: Plan) -> Verdict:
    """What a plan comes to. One that was made of too little knowledge has no figures."""
    if plan.actions or plan.give_up:
        return Verdict.CHANGES
    return Verdict.KEPT if plan.numbers else Verdict.BLIND


def begin_step(plan: Plan, pool: str, *, at_s: float, planner: str, term: int, dry_run: bool) -> Step:
    """A plan of which nothing has been begun."""
    decided: Sequence[GiveUp | Action] = (*plan.give_up, *plan.actions)
    return Step(
        pool=pool,
        at_s=at_s,
        planner=planner,
        term=term,
        kind=kind_of(plan),
        verdict=plan.verdict,
        reasons=tuple(plan.reasons),
        numbers=dict(plan.numbers),
        done=tuple(_decided(action) for action in decided),
        dry_run=dry_run,
    )


def with_outcome(step: Step, index: int, did: Did, detail: str) -> Step:
    """What came of the `index`-th thing that was decided."""
    done = list(step.done)
    done[index] = replace(done[index], did=did, detail=detail)
    return replace(step, done=tuple(done))


def _decided(action: Action | GiveUp) -> Done:
    fields = as_json(action)
    fields.pop("epoch", None)
    return Done(**fields)


class Journal:
    """Which steps are worth keeping: those that do something or say something new, and now and then any."""

    def __init__(self) -> None:
        self._last: Step | None = None
        self._repeated = 0

    def entry(self, step: Step) -> Step | None:
        """The step as it is to be kept; None for one that says what the one before said."""
        last = self._last
        if (
            last is not None
            and not step.done
            and not last.done
            and _said(step) == _said(last)
            and 0 <= step.at_s - last.at_s < AT_LEAST_EVERY_S
        ):
            self._repeated += 1
            return None
        kept = replace(step, repeated=self._repeated)
        self._last, self._repeated = step, 0
        return kept


def _said(step: Step) -> tuple[str, str]:
    """Without its figures, which are others each time."""
    return step.kind, _FIGURES.sub("#", step.verdict)


# For people.


def as_dict(step: Step) -> dict[str, Any]:
    """For JSON."""
    fields = asdict(step)
    return {"time": iso_time(step.at_s), **fields}


def iso_time(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


def as_text(step: Step) -> str:
    """A few lines: the verdict, what was done, why, and the figures that entered."""
    dry = ", dry run" if step.dry_run else ""
    again = f" ({step.repeated} steps before said the same)" if step.repeated else ""
    lines = [f"{iso_time(step.at_s)}  pool {step.pool}  planner {step.planner}{dry}{again}", f"  {step.verdict}"]
    for each in step.done:
        what = f"{each.action} {each.worker}".rstrip()
        what += f" {each.count} x {each.role}" if each.count else (f" to {each.role}" if each.role else "")
        came = f"{each.did}{f': {each.detail}' if each.detail else ''}" if each.did else "not known: its planner ended"
        lines.append(f"  * {what} -> {came}")
        if each.why:
            lines.append(f"      because {each.why}")
    lines += [f"  - {reason}" for reason in step.reasons]
    if step.numbers:
        figures = (f"{name} {number:.4g}" for name, number in step.numbers.items())
        lines.append(f"  figures: {', '.join(figures)}")
    return "\n".join(lines)
