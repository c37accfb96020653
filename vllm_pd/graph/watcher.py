"""A graph on the terminal: what comes up and what fails, as it happens, and how everything is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_pd.console import print_table
from vllm_pd.graph.log_files import Follower
from vllm_pd.graph.status import GraphState, GraphStatus, InstanceStatus, Phase
from vllm_pd.status_line import StatusLine

_SHOWN_LOG_LINES = 8


class Watcher:
    """Prints a line for each thing that happens, and one that changes for what is waited for."""

    def __init__(self, title: str) -> None:
        self._line = StatusLine(title)
        self._seen = 0

    def __call__(self, status: GraphStatus) -> None:
        """Show what is new in `status`."""
        self.news(status)
        pending = [i for i in status.instances if i.phase in (Phase.STARTING, Phase.BACKOFF)]
        if status.state is GraphState.STOPPING:
            left = [i.name for i in status.instances if i.phase is not Phase.ENDED]
            self._line.show(f"ending {', '.join(left)}")
        elif pending:
            self._line.show(f"waiting for {', '.join(i.name for i in pending)}{_last_words(pending)}")

    def news(self, status: GraphStatus) -> None:
        """Print what happened since the last time."""
        for event in status.events:
            if event.number > self._seen:
                self._line.clear()
                print(f"  {event.text}", flush=True)
                self._seen = event.number

    def skip(self, status: GraphStatus) -> None:
        """What happened so far is not news."""
        self._seen = max((event.number for event in status.events), default=0)

    def done(self, outcome: str) -> None:
        """The last line."""
        self._line.done(outcome)


def _last_words(pending: Sequence[InstanceStatus]) -> str:
    """What the slowest of them has just written to its log."""
    slowest = max(pending, key=lambda i: i.for_s)
    words = Follower(Path(slowest.log), slowest.name).last(1)
    return f": {words[-1]}" if words and words[-1].strip() else ""


def print_status(status: GraphStatus) -> None:
    """One graph: a line, a table, and for what does not work the reason and the end of its log."""
    endpoint = f"  {status.url}  model {status.model}" if status.url else ""
    print(f"{status.graph}: {status.state}, for {span(status.for_s)}{endpoint}")
    rows = [
        (
            i.name,
            str(i.phase),
            span(i.for_s),
            str(i.pid or "-"),
            i.url.partition("://")[2] or "-",
            i.place or "-",
            str(i.restarts),
        )
        for i in status.instances
    ]
    print_table(("process", "state", "for", "pid", "address", "on", "restarts"), rows)
    for i in status.instances:
        if i.detail:
            print(f"\n{i.name} waits {i.detail}" if i.phase is Phase.WAITING else f"\n{i.name} {i.phase}: {i.detail}")
        for line in i.log_end[-_SHOWN_LOG_LINES:]:
            print(f"    {line}")
        if i.log_end:
            print(f"  (from {i.log})")


def print_ready(status: GraphStatus) -> None:
    """What to do with a graph that is up."""
    print(f"\n{status.graph} answers at {status.url} (OpenAI API). Try:\n")
    print(
        f"  curl {status.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{status.model}", "messages": [{{"role": "user", "content": "Who are you?"}}]}}\'\n'
    )


def span(seconds: float) -> str:
    """`12 s`, `3 min`, `5 h`, `2 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
