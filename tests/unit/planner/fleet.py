"""Workers that somebody outside starts and ends, for the actuators that ask a program or an HTTP server: a file that
says which there are, and a program that changes it.
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REFUSED = 3


class Fleet:
    """What the file says."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def open(self) -> Iterator[dict[str, Any]]:
        """Its content, written back if it was changed."""
        with self._path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            state = json.loads(text or '{"workers": {}, "starting": {}, "held": false, "broken": false, "made": 0}')
            yield state
            if json.dumps(state) != text:
                file.seek(0)
                file.truncate()
                file.write(json.dumps(state))

    def do(self, asked: dict[str, Any]) -> tuple[int, str, str]:
        """Exit status, answer and complaint of what is asked for as JSON."""
        with self.open() as state:
            if state["broken"]:
                return 1, "", "the fleet is on fire"
            match asked["action"]:
                case "starting":
                    found = [{"role": role, "count": n, "for_s": 1.5} for role, n in state["starting"].items() if n]
                    return 0, json.dumps(found), ""
                case "add":
                    starting = state["starting"]
                    starting[asked["role"]] = starting.get(asked["role"], 0) + asked["count"]
                    if not state["held"]:
                        come_up(state)
                case "give_up":
                    starting = state["starting"]
                    starting[asked["role"]] = max(0, starting.get(asked["role"], 0) - asked["count"])
                case "remove":
                    if asked["worker"] not in state["workers"]:
                        return REFUSED, "", f"there is no {asked['worker']} here"
                    del state["workers"][asked["worker"]]
        return 0, "", ""


def come_up(state: dict[str, Any]) -> None:
    """What was started is up."""
    for role, count in state["starting"].items():
        for _ in range(count):
            state["made"] += 1
            state["workers"][f"10.0.1.{state['made']}:8000"] = [1_764_000_000_000 + state["made"], role]
    state["starting"] = {}


if __name__ == "__main__":
    status, answer, complaint = Fleet(Path(sys.argv[1])).do(json.load(sys.stdin))
    print(answer)
    print(complaint, file=sys.stderr)
    sys.exit(status)
