"""Our own code against one vLLM's source: what we implement of its base classes, and what we use of its objects.

The table of internals says what we rely on in words; this reads our code itself, so that neither a new abstract
method, nor a parameter that vLLM has begun to pass to a method we override, nor a renamed field goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.contract.checker import Violation
from tests.contract.shapes import Member, override_refusal
from tests.contract.source import ClassSource, SourceTree
from tests.contract.uses import Use, uses_of_class, uses_of_module
from vllm_pd.vllm_compat import INTERNALS
from vllm_pd.vllm_compat.version import supported_text

REPOSITORY = Path(__file__).parents[2]

ROOMS: Mapping[str, Path] = {
    "vllm_pd": REPOSITORY / "vllm_pd",
    "vllm_pd.connectors": REPOSITORY / "connectors",
    "vllm_pd.kv_offload": REPOSITORY / "kv_offload",
    "vllm_pd.router": REPOSITORY / "router",
}
"""Import name of each room to its folder, as in setup.py."""

COMPAT = "vllm_pd.vllm_compat"


@dataclass(frozen=True, slots=True)
class Definition:
    """A member and the class that defines it."""

    owner: ClassSource
    member: Member


def tree_with(vllm: Path, rooms: Mapping[str, Path] = ROOMS) -> SourceTree:
    """The rooms together with the package folder of a vLLM, the names of vllm_compat leading into it."""
    aliases = {(COMPAT, entry.alias): (entry.module, entry.name) for entry in INTERNALS}
    return SourceTree({**rooms, "vllm": vllm}, aliases)


def implementations(tree: SourceTree, rooms: Mapping[str, Path] = ROOMS) -> list[ClassSource]:
    """Our classes that have a class of vLLM's among their bases."""
    found = []
    for module in _modules(tree, rooms):
        for name in tree.names(module):
            cls = tree.resolve(module, name)
            if isinstance(cls, ClassSource) and cls.module == module and any(map(of_vllm, tree.mro(cls)[0])):
                found.append(cls)
    return found


def check_rooms(tree: SourceTree, label: str, rooms: Mapping[str, Path] = ROOMS) -> dict[str, list[Violation]]:
    """Violations by subject: each of our implementing classes, then each module that uses vLLM otherwise."""
    ours = implementations(tree, rooms)
    out: dict[str, list[Violation]] = {cls.where: _check_class(tree, cls, label) for cls in ours}
    for module in _modules(tree, rooms):
        if module == COMPAT:
            continue
        checked, problems = 0, []
        for use in uses_of_module(tree, module):
            checked += 1
            problems += _violations_of_use(module, use, label)
        if checked:
            out[module] = problems
    return out


def optional_news(new: SourceTree, old: SourceTree, rooms: Mapping[str, Path] = ROOMS) -> dict[str, list[str]]:
    """By class of vLLM's that we implement or that a base of ours has: public methods that `old` did not have.

    They have a default, so nothing breaks; whoever maintains our class decides whether to define them.
    """
    news: dict[str, list[str]] = {}
    for cls in implementations(new, rooms):
        for base in filter(of_vllm, new.mro(cls)[0]):
            before = old.resolve(base.module, base.name)
            known = old.members(before) if isinstance(before, ClassSource) else {}
            names = [
                name
                for name, member in new.scan(base).members.items()
                if name not in known and not name.startswith("_") and _is_function(member)
            ]
            if names:
                news[base.where] = names
    return news


def of_vllm(cls: ClassSource) -> bool:
    return cls.module == "vllm" or cls.module.startswith("vllm.")


def _modules(tree: SourceTree, rooms: Mapping[str, Path]) -> Iterator[str]:
    for room in rooms:
        yield from tree.modules(room)


def _check_class(tree: SourceTree, cls: ClassSource, label: str) -> list[Violation]:
    order, _ = tree.mro(cls)
    layers = [(owner, tree.scan(owner).members) for owner in order]
    problems = [*_unimplemented(cls, layers), *_refused_overrides(layers)]
    violations = [Violation(cls.where, f"{text} {label}; {_supported()}") for text in problems]
    for use in uses_of_class(tree, cls):
        violations += _violations_of_use(cls.where, use, label)
    return violations


def _unimplemented(cls: ClassSource, layers: list[tuple[ClassSource, dict[str, Member]]]) -> Iterator[str]:
    first: dict[str, Definition] = {}
    for owner, members in layers:
        for name, member in members.items():
            if not member.declared_only:
                first.setdefault(name, Definition(owner, member))
    for name, definition in first.items():
        if definition.member.abstract and of_vllm(definition.owner):
            yield f"{cls.where} does not define {name}, which is abstract in {definition.owner.where} of"


def _refused_overrides(layers: list[tuple[ClassSource, dict[str, Member]]]) -> Iterator[str]:
    for i, (owner, members) in enumerate(layers):
        if of_vllm(owner):
            continue
        for name, member in members.items():
            base = next((Definition(o, m[name]) for o, m in layers[i + 1 :] if of_vllm(o) and name in m), None)
            if base is None or member.declared_only:
                continue
            if member.is_property != base.member.is_property and _is_function(member) and _is_function(base.member):
                yield f"{owner.where}.{name} and {base.owner.where}.{name} are not both properties, in"
            elif member.signature is not None and base.member.signature is not None:
                # A constructor may ask for more: vLLM's factories pass the user's options on by name.
                refused = override_refusal(member.signature, base.member.signature, may_ask=name == "__init__")
                if refused:
                    yield f"{owner.where}.{name} overrides {base.owner.where}.{name} and {refused}, in"


def _is_function(member: Member) -> bool:
    return member.signature is not None or member.is_property


def _violations_of_use(subject: str, use: Use, label: str) -> list[Violation]:
    if use.problem is None:
        return []
    return [Violation(subject, f"{use.where} uses {use.what}, which in {label} {use.problem}; {_supported()}")]


def _supported() -> str:
    return f"vllm-pd supports vLLM {supported_text()}."
