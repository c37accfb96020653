"""`python -m tests.contract`: does a vLLM release have what vllm-pd uses? Reads its source, imports nothing of it.

Exit status: 0 everything holds, 1 something does not, 2 the check could not be made.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.contract.accelerators import ACCELERATORS
from tests.contract.checker import Violation, check_all
from tests.contract.rooms import check_rooms, optional_news, tree_with
from tests.contract.source import SourceView
from tests.contract.wheel import WheelUnavailable, source_of
from vllm_pd.vllm_compat import INTERNALS
from vllm_pd.vllm_compat.version import version_warning, vllm_version


@dataclass(frozen=True, slots=True)
class Report:
    """What was checked.

    Attributes:
        label: the vLLM, as sentences name it.
        internals: alias of each internal to its violations.
        rooms: each class or module of ours that uses vLLM to its violations.
        notes: sentences about what is new and need not worry anybody.
    """

    label: str
    internals: dict[str, list[Violation]]
    rooms: dict[str, list[Violation]]
    notes: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[Violation]:
        return [v for part in (self.internals, self.rooms) for found in part.values() for v in found]


def check_source(folder: Path, label: str) -> Report:
    """Check the unpacked wheel in `folder` (the folder that holds `vllm`)."""
    tree = tree_with(folder / "vllm")
    notes = []
    reference = importlib.util.find_spec("vllm")
    if reference is not None and reference.submodule_search_locations:
        installed = Path(next(iter(reference.submodule_search_locations)))
        # Beside itself nothing is new, and a second tree would take as long to read as the first.
        news = {} if installed.samefile(folder / "vllm") else optional_news(tree, tree_with(installed))
        for owner, names in news.items():
            notes.append(f"{owner} has {', '.join(names)}, optional, which the installed {vllm_version()} has not.")
    return Report(
        label, check_all((*INTERNALS, *ACCELERATORS), SourceView(tree, label)), check_rooms(tree, label), notes
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contract", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--vllm", metavar="VERSION", help="a release; its wheel alone is downloaded, once")
    where.add_argument("--source", metavar="DIR", type=Path, help="an unpacked wheel: the folder that holds vllm/")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    try:
        folder = source_of(args.vllm) if args.vllm else _given(args.source)
    except WheelUnavailable as e:
        print(f"tests.contract: error: {e}", file=sys.stderr)
        return 2
    report = check_source(folder, f"vLLM {args.vllm}" if args.vllm else f"vLLM in {folder}")
    if args.vllm and (warning := version_warning(args.vllm)):
        report.notes.append(warning)
    print(_as_json(report) if args.json else _as_text(report))
    return 1 if report.violations else 0


def _given(folder: Path) -> Path:
    if not (folder / "vllm" / "__init__.py").is_file():
        raise WheelUnavailable(f"{folder} holds no vllm/__init__.py; give the folder into which a wheel was unpacked.")
    return folder


def _as_text(report: Report) -> str:
    lines = []
    for part in (report.internals, report.rooms):
        for subject, violations in part.items():
            lines += [f"violation  {subject}: {v.sentence}" for v in violations] or [f"ok         {subject}"]
    lines += [f"note       {note}" for note in report.notes]
    count = len(report.violations)
    lines.append(f"{report.label}: {len(report.internals)} internals, {len(report.rooms)} users, {count} violations.")
    return "\n".join(lines)


def _as_json(report: Report) -> str:
    def plain(part: dict[str, list[Violation]]) -> dict[str, list[str]]:
        return {subject: [v.sentence for v in violations] for subject, violations in part.items()}

    return json.dumps(
        {
            "vllm": report.label,
            "holds": not report.violations,
            "internals": plain(report.internals),
            "users": plain(report.rooms),
            "notes": report.notes,
        },
        indent=2,
    )


if __name__ == "__main__":
    sys.exit(main())
