"""The fault matrix as a page for people."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from benchmarks.common import machine
from tests.faults.injections import NETWORK_MEANING
from tests.faults.matrix import CLIENTS, DEADLINE_S, SETTLE_S, Row
from tests.faults.phases import Phase
from tests.faults.results import Results

_INTRO = """# Fault matrix

Written by `make test-faults`; do not edit. Real vLLM {vllm} processes: two prefill workers, two decode workers, a
router and a store, on {cores} cores ({cpu}). {clients} clients ask all the time: chat and completions, streamed and
not, half of them with prompts that no cache can help. Each row is one fault, struck at a moment with requests in as
many phases as could be found, and the load goes on.

Checked in every row: each answer has exactly the tokens of an undisturbed one; nobody waits longer than {deadline:.0f}
s; a request that could be served is served, and an error comes only with status and reason; {settle:.0f} s after the
last answer at the latest, the blocks of every worker, the router's counters and the queue are as before; then
everything that died is started again and serves.

- A number is how many requests were in that phase when the fault struck; in parentheses those that were not answered
  in full. Phases are what the engines themselves say.
- *queued*: running nowhere yet. *transferring*: its KV is on the way, from another worker or a lower tier. *waiting at
  decode*: prefilled, and not running at the decode worker.
- **hit**: requests of these that the struck worker had. **stall**: longest gap in a stream that was answered in full.
  **free**: from the last answer until everything was as before.
- *slow*: the processes run a quarter of the time for 10 s. *engine only*: the API server stays as it is.
- *network*: the links from the router to one prefill and one decode worker. There {meaning}.
- A stream with a seed cannot go on exactly at another worker, so it ends with an error event that says so. Some
  requests have one.
- There is one router. What it has in hand is lost when it is killed, and while it is away nobody is served.
"""


def page(found: Results) -> str:
    """The whole page."""
    rows, aborts, some = found.in_order(), found.aborts, list(found.scenes.values())
    about = machine()
    meaning = "; ".join(f"*{fault}* {what}" for fault, what in NETWORK_MEANING.items())
    text = _INTRO.format(
        vllm=metadata.version("vllm"),
        cores=about["cores"],
        cpu=about["cpu"],
        clients=CLIENTS,
        deadline=DEADLINE_S,
        settle=SETTLE_S,
        meaning=meaning,
    )
    total = sum(row.requests for row in rows)
    bad = sum(len(row.wrongs) for row in rows)
    text += f"\n{total} requests in {len(rows)} rows; {bad or 'no'} violation{'' if bad == 1 else 's'}. "
    text += f"Run (date, commit): {'; '.join(sorted(set(found.ran.values())))}.\n\n"
    head = ["who", "fault", *Phase, "hit", "requests", "not ok", "slowest s", "stall s", "free s"]
    text += _table(head, [_cells(row) for row in rows])
    text += "\n## What requests were told that were not answered in full\n\n"
    said = [(row, reason, count) for row in rows for reason, count in row.reasons.items()]
    lines = [[row.target, row.fault, str(count), _safe(reason)] for row, reason, count in said]
    text += _table(["who", "fault", "times", "reason"], lines)
    if aborts is not None:
        text += "\n## Clients that leave\n\n"
        text += "Until no engine had the request any more, its blocks on both sides included.\n\n"
        lines = [[p, str(aborts.left[p]), f"{aborts.let_go_after[p]:.2f}"] for p in Phase]
        text += _table(["phase", "clients that left", "slowest s"], lines)
    if some:
        text += "\n## Not a fault\n\n"
        lines = [[scene.name, str(scene.requests), str(len(scene.wrongs)), f"{scene.slowest:.1f}"] for scene in some]
        text += _table(["what", "requests", "violations", "slowest s"], lines)
    wrongs = [(f"{row.target}, {row.fault}", wrong) for row in rows for wrong in row.wrongs]
    wrongs += [("clients that leave", wrong) for wrong in (aborts.wrongs if aborts else [])]
    wrongs += [(scene.name, wrong) for scene in some for wrong in scene.wrongs]
    if wrongs:
        text += "\n## Violations\n\n" + "".join(f"- {where}: {_safe(what)}\n" for where, what in wrongs)
    return text


def _cells(row: Row) -> list[str]:
    numbers = [_phase(row.phases.get(phase, {})) for phase in Phase]
    others = sum(count for outcome, count in row.outcomes.items() if outcome != "ok")
    times = [f"{value:.1f}" for value in (row.slowest, row.longest_stall, row.settled_after)]
    return [row.target, row.fault, *numbers, str(row.hit), str(row.requests), str(others or "–"), *times]


def _phase(outcomes: dict[str, int]) -> str:
    others = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items() if outcome != "ok")
    total = sum(outcomes.values())
    return f"{total or '–'}" + (f" ({others})" if others else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "None.\n"
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _safe(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
