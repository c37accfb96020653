"""The vLLM of this environment, imported and inspected."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from types import ModuleType
from typing import Any

from tests.contract.class_scan import scan_class
from tests.contract.shapes import Kind, Member, Missing, Parameter, Signature, Thing
from vllm_pd.vllm_compat.version import vllm_version

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: Kind.POSITIONAL,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: Kind.POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY: Kind.KEYWORD_ONLY,
    inspect.Parameter.VAR_POSITIONAL: Kind.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD: Kind.VAR_KEYWORD,
}


class InstalledView:
    """Looks at live objects; only attributes that methods assign to `self` are read from the source."""

    @property
    def label(self) -> str:
        return f"vLLM {vllm_version()} (installed)"

    def find(self, module: str, name: str) -> Thing | Missing:
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError as e:
            if e.name and (module == e.name or module.startswith(f"{e.name}.")):
                return Missing.MODULE
            raise
        if not hasattr(owner, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ModuleNotFoundError:
                return Missing.NAME
        return Thing(f"{module}.{name}", _members(getattr(owner, name)))


def _members(value: Any) -> dict[str, Member]:
    if inspect.isclass(value):
        return _class_members(value)
    if isinstance(value, ModuleType):
        return {name: Member(name, _signature(member)) for name, member in vars(value).items()}
    if inspect.isroutine(value):
        return {"__call__": Member("__call__", _signature(value))}
    return _class_members(type(value))


def _class_members(cls: type) -> dict[str, Member]:
    members: dict[str, Member] = {}
    for base in reversed(cls.__mro__[:-1]):
        for name in inspect.get_annotations(base):
            members.setdefault(name, Member(name))
        for name in _assigned_to_self(base):
            members.setdefault(name, Member(name))
        for name, raw in vars(base).items():
            members[name] = _member(name, raw)
    if dataclasses.is_dataclass(cls):
        members |= {f.name: members.get(f.name, Member(f.name)) for f in dataclasses.fields(cls)}
    if (constructor := _signature(cls)) is not None:
        members["__init__"] = Member("__init__", constructor)
    return members


def _member(name: str, raw: Any) -> Member:
    abstract = bool(getattr(raw, "__isabstractmethod__", False))
    if isinstance(raw, property):
        return Member(name, abstract=abstract, is_property=True)
    if isinstance(raw, staticmethod):
        return Member(name, _signature(raw.__func__), abstract=abstract)
    if isinstance(raw, classmethod):
        raw = raw.__func__
    signature = _signature(raw) if inspect.isfunction(raw) else None
    return Member(name, signature[1:] if signature is not None else None, abstract=abstract)


def _signature(value: Any) -> Signature | None:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    return tuple(Parameter(p.name, _KINDS[p.kind], _required(p)) for p in parameters)


def _required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not variadic


def _assigned_to_self(cls: type) -> list[str]:
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return []
    return list(scan_class(node).members) if isinstance(node, ast.ClassDef) else []
