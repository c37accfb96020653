"""What the matrix has shown so far, kept between runs, so that a cell can be run again without all the others."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.faults.aborts import Aborts
from tests.faults.injections import MATRIX, Fault, Target
from tests.faults.matrix import Row
from tests.faults.scenes import Scene


@dataclass(slots=True)
class Results:
    """The latest of each row and scene, and of the clients that leave; `ran` names when and from which commit."""

    rows: dict[tuple[Target, Fault], Row] = field(default_factory=dict)
    scenes: dict[str, Scene] = field(default_factory=dict)
    aborts: Aborts | None = None
    ran: dict[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return set(MATRIX) <= self.rows.keys() and self.aborts is not None and bool(self.scenes)

    def in_order(self) -> Sequence[Row]:
        return [self.rows[cell] for cell in MATRIX if cell in self.rows]

    def took(self, what: Row | Scene | Aborts) -> None:
        """Put in the place of an earlier result of the same."""
        if isinstance(what, Row):
            self.rows[Target(what.target), Fault(what.fault)] = what
            name = f"{what.target}, {what.fault}"
        elif isinstance(what, Scene):
            self.scenes[what.name] = what
            name = what.name
        else:
            self.aborts = what
            name = "clients that leave"
        self.ran[name] = _now()

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".tmp")
        written.write_text(
            json.dumps(
                {
                    "rows": [row.as_dict() for row in self.rows.values()],
                    "scenes": [asdict(scene) for scene in self.scenes.values()],
                    "aborts": self.aborts and asdict(self.aborts),
                    "ran": self.ran,
                },
                indent=1,
            )
        )
        written.replace(path)

    @classmethod
    def load(cls, path: Path) -> Results:
        """What `save` wrote; nothing if there is no such file or it is of another version of these tests."""
        try:
            kept: dict[str, Any] = json.loads(path.read_text())
            found = cls(ran=dict(kept["ran"]))
            for row in kept["rows"]:
                found.rows[Target(row["target"]), Fault(row["fault"])] = Row(**row)
            found.scenes = {scene["name"]: Scene(**scene) for scene in kept["scenes"]}
            found.aborts = Aborts(**kept["aborts"]) if kept["aborts"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return cls()
        return found


def _now() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return f"{datetime.now(UTC):%Y-%m-%d}, {commit.stdout.strip() or 'no commit'}"
