"""What the contract checker knows about a Python object, wherever it learned it: names, members, signatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """How a parameter is given."""

    POSITIONAL = ""
    KEYWORD_ONLY = "keyword"
    VAR_POSITIONAL = "*"
    VAR_KEYWORD = "**"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, `self` and `cls` left out everywhere."""

    name: str
    kind: Kind = Kind.POSITIONAL
    required: bool = True


Signature = tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a class, module or function (a function's only member is `__call__`).

    Attributes:
        name: its name.
        signature: its parameters, or None when it is not a function.
        abstract: whether a subclass must define it.
        declared_only: annotated in a class body without a value, so nothing is there until somebody assigns it.
        is_property: read like an attribute, defined like a method.
    """

    name: str
    signature: Signature | None = None
    abstract: bool = False
    declared_only: bool = False
    is_property: bool = False


@dataclass(frozen=True, slots=True)
class Thing:
    """What a name of a module stands for, with all members that it has, inherited ones too."""

    where: str
    members: Mapping[str, Member] = field(default_factory=dict)


class Missing(Enum):
    """Why there is no Thing."""

    MODULE = "no module"
    NAME = "no name"


def positional(signature: Signature) -> tuple[str, ...]:
    return tuple(p.name for p in signature if p.kind is Kind.POSITIONAL)


def has(signature: Signature, kind: Kind) -> bool:
    return any(p.kind is kind for p in signature)


def written(signature: Signature) -> str:
    """`(a, b=..., *, c)`, as it stands in a sentence."""
    words: list[str] = []
    starred = False
    for p in signature:
        if p.kind is Kind.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        if p.kind is Kind.VAR_POSITIONAL:
            starred = True
        prefix = p.kind.value if p.kind in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD) else ""
        words.append(f"{prefix}{p.name}" + ("" if p.required or prefix else "=..."))
    return f"({', '.join(words)})"


def refusal(signature: Signature, wanted: Sequence[str]) -> str | None:
    """Why a caller that gives exactly `wanted`, by position or by name, is refused; None when it is not."""
    names = positional(signature)
    if names[: len(wanted)] != tuple(wanted):
        if has(signature, Kind.VAR_POSITIONAL) and has(signature, Kind.VAR_KEYWORD):
            return None
        return f"takes {written(signature)} where vllm-pd uses ({', '.join(wanted)})"
    unknown = [
        p.name
        for p in signature
        if p.required and p.kind in (Kind.POSITIONAL, Kind.KEYWORD_ONLY) and p.name not in wanted
    ]
    return f"requires {', '.join(unknown)} too, which vllm-pd does not give" if unknown else None


def call_refusal(signature: Signature, count: int, keywords: Sequence[str]) -> str | None:
    """Why a call with `count` positional arguments and these keywords fails; None when it does not."""
    names = positional(signature)
    if count > len(names) and not has(signature, Kind.VAR_POSITIONAL):
        return f"takes {written(signature)}, fewer than the {count} arguments given by position"
    by_name = {p.name for p in signature if p.kind in (Kind.POSITIONAL, Kind.KEYWORD_ONLY)}
    if not has(signature, Kind.VAR_KEYWORD):
        for word in keywords:
            if word not in by_name:
                return f"takes {written(signature)}, which has no {word}"
    given = {*names[:count], *keywords}
    lacking = [p.name for p in signature if p.required and p.name in by_name and p.name not in given]
    return f"requires {', '.join(lacking)} too" if lacking else None


def override_refusal(ours: Signature, base: Signature, *, may_ask: bool = False) -> str | None:
    """Why vLLM, calling by the base's signature, fails on our override; None when it does not.

    With `may_ask` the override may require parameters that the base does not have.
    """
    if has(ours, Kind.VAR_POSITIONAL) and has(ours, Kind.VAR_KEYWORD):
        return None
    ours_names, base_names = positional(ours), positional(base)
    keywords = {p.name for p in ours if p.kind in (Kind.POSITIONAL, Kind.KEYWORD_ONLY)}
    swallows_names = has(ours, Kind.VAR_KEYWORD)
    for i, name in enumerate(base_names):
        same_place = i < len(ours_names) and ours_names[i] == name
        if not same_place and not (swallows_names or (name in keywords and i >= len(ours_names))):
            return f"takes {written(ours)} where vLLM may give {written(base)}"
    for p in base:
        if p.kind is Kind.KEYWORD_ONLY and p.name not in keywords and not swallows_names:
            return f"takes {written(ours)} where vLLM may give {p.name}"
        if p.kind is Kind.VAR_KEYWORD and not swallows_names:
            return f"takes {written(ours)} where vLLM may give further names"
    offered = set(base_names) | {p.name for p in base}
    extra = [p.name for p in ours if p.required and p.name in keywords and p.name not in offered]
    return f"requires {', '.join(extra)}, which vLLM does not give" if extra and not may_ask else None
