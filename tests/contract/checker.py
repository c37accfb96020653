"""The contract between vllm-pd and vLLM, checked entry by entry. Pure: a `View` says what a vLLM offers.

There are two views: `installed.InstalledView` imports vLLM and inspects it, `source.SourceView` reads an unpacked wheel
and imports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from tests.contract.shapes import Member, Missing, Thing, refusal
from vllm_pd.vllm_compat.internal import Internal
from vllm_pd.vllm_compat.version import supported_text


class View(Protocol):
    """One vLLM, as far as the contract needs it."""

    @property
    def label(self) -> str:
        """`vLLM 0.33.0`, as sentences name it."""

    def find(self, module: str, name: str) -> Thing | Missing:
        """What `from module import name` gives, a submodule included."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A sentence that says what is wrong, where, what we need it for, and which versions are supported."""

    subject: str
    sentence: str


def check_all(entries: Iterable[Internal], view: View) -> dict[str, list[Violation]]:
    """Alias to its violations, an empty list for each entry that holds."""
    return {entry.alias: check(entry, view) for entry in entries}


def check(entry: Internal, view: View) -> list[Violation]:
    """The violations of one entry."""
    thing = view.find(entry.module, entry.name)
    if thing is Missing.MODULE:
        return [_violation(entry, f"{view.label} has no module {entry.module}, where vllm-pd expects {entry.name}")]
    if thing is Missing.NAME:
        return [_violation(entry, f"{view.label} has no {entry.name} in {entry.module}")]
    violations = []
    for text in entry.members:
        name, wanted = parse_member(text)
        problem = _problem(thing.members.get(name), wanted)
        if problem:
            owner = f"{entry.module}.{entry.name}"
            sentence = (
                f"{owner} of {view.label} {problem.format(name=name)}"
                if name not in thing.members
                else f"{owner}.{name} of {view.label} {problem}"
            )
            violations.append(_violation(entry, sentence))
    return violations


def parse_member(text: str) -> tuple[str, tuple[str, ...] | None]:
    """`method(a, b)` gives its name and ("a", "b"); `attribute` gives its name and None.

    Raises:
        ValueError: `text` is neither.
    """
    match = re.fullmatch(r"(\w+)(?:\(([\w, ]*)\))?", text)
    if match is None:
        raise ValueError(f"{text!r} is neither a name nor a name with parameters in parentheses")
    name, parameters = match.groups()
    if parameters is None:
        return name, None
    return name, tuple(p.strip() for p in parameters.split(",") if p.strip())


def _problem(member: Member | None, wanted: tuple[str, ...] | None) -> str | None:
    if member is None:
        return "has no method {name}" if wanted is not None else "has no attribute {name}"
    if wanted is None:
        return None
    if member.signature is None:
        return "is not a method any more"
    return refusal(member.signature, wanted)


def _violation(entry: Internal, what: str) -> Violation:
    return Violation(
        entry.alias, f"{what}, which vllm-pd needs ({entry.why}); vllm-pd supports vLLM {supported_text()}."
    )
