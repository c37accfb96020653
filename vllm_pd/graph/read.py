"""A graph from a file, and back into the mapping that such a file holds.

    graph: disagg-router
    model: Qwen/Qwen3-8B
    workers:                       # what every prefill, decode and worker component gets
      args: {max-model-len: 16384}
    components:
      frontend: {port: 8080, links: [router]}
      router: {links: [decode]}
      decode: {count: 2, links: [prefill]}
      prefill: {}
      store: {}

A component is called by its kind, or by any name with `kind:` in it. `${NAME}` and `${NAME:-otherwise}` stand for
variables of the environment in every text; `$$` is one `$`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from vllm_pd import layered, parsers
from vllm_pd.errors import SettingsError
from vllm_pd.graph.model import COMPONENTS, Component, Graph, Kind, Limits, Link, RestartRule, Workers
from vllm_pd.layered import check_keys, nearest
from vllm_pd.settings_file import parse_yaml, read_file

_TOP = ("graph", "model", "namespace", "restart", "workers", "components", "kubernetes")
_VARIABLE = re.compile(r"\$(?:\$|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})")
_SHARED = tuple(f.name for f in fields(Workers) if f.name not in ("name", "count"))


def load(path: str, *, sets: Sequence[str] = (), environ: Mapping[str, str]) -> Graph:
    """The graph in a YAML file. It is not checked as a whole: `check.check` does that.

    Args:
        sets: changes to the file, `decode.count=2` or `model=NAME`; values are YAML.
        environ: for variables.

    Raises:
        SettingsError: it cannot be read, or something in it is unknown or malformed; the message names the place.
    """
    data = read_file(path, flag="the path", example="graph: my-cluster")
    for assignment in sets:
        data = override(data, assignment)
    data = _substituted(data, path, environ)
    data.setdefault("graph", Path(path).stem.replace("_", "-").lower())
    return from_mapping(data, path)


def override(data: Mapping[str, Any], assignment: str) -> dict[str, Any]:
    """`data` with one value replaced: `decode.count=2`, `frontend.settings.policy=prefix`, `model=NAME`.

    Raises:
        SettingsError: malformed, or the path leads through something that is no mapping.
    """
    path, equals, text = assignment.partition("=")
    steps = path.strip().split(".")
    if not equals or not all(steps):
        raise SettingsError(f"--set {assignment!r} must be KEY=VALUE, for example decode.count=2.")
    try:
        value = parse_yaml(text)
    except yaml.constructor.ConstructorError as e:
        raise SettingsError(f"--set {assignment!r}: {e.problem}.") from None
    except yaml.YAMLError:
        value = text
    changed = copy.deepcopy(dict(data))
    components = changed.get("components")
    if steps[0] not in _TOP:
        known = list(components) if isinstance(components, Mapping) else []
        if steps[0] not in known:
            raise SettingsError(
                f"--set {path}: the graph has no {steps[0]!r}{nearest(steps[0], [*_TOP, *map(str, known)])}."
            )
        steps = ["components", *steps]
    at: dict[str, Any] = changed
    for depth, step in enumerate(steps[:-1]):
        inner = at.get(step)
        if inner is not None and not isinstance(inner, dict):
            where = ".".join(steps[: depth + 1])
            raise SettingsError(f"--set {path}: {where} is no mapping but {inner!r}; set it as a whole.")
        at[step] = inner = dict(inner or {})
        at = inner
    at[steps[-1]] = value
    return changed


def from_mapping(data: Mapping[str, Any], where: str) -> Graph:
    """The graph that a file with this content describes; `where` names it in messages. Raises SettingsError."""
    known = check_keys(data, list(_TOP), where)
    defaults = _fields(known.get("workers"), "workers", _SHARED)
    entries = _mapping(known.get("components"), "components")
    if not entries:
        raise SettingsError(f"{where} has no components; name at least a frontend and some workers.")
    components, links = [], []
    for name, raw in entries.items():
        component, targets = _component(str(name), raw, defaults)
        components.append(component)
        links += [Link(component.label, target) for target in targets]
    return Graph(
        name=_parsed(layered.text, known.get("graph", ""), "graph"),
        # Components may name models of their own; `check` says who has none.
        model=_parsed(layered.text, known["model"], "model") if known.get("model") else "",
        components=tuple(components),
        links=tuple(links),
        namespace=_parsed(parsers.namespace, known.get("namespace") or "default", "namespace"),
        restart=_record(RestartRule, known.get("restart"), "restart"),
        kubernetes=_mapping(known.get("kubernetes"), "kubernetes"),
    )


def to_mapping(graph: Graph) -> dict[str, Any]:
    """What `from_mapping` turns back into an equal graph. Only plain values, and only what is not the default."""
    components: dict[str, Any] = {}
    for component in graph.components:
        entry: dict[str, Any] = {} if component.label == component.kind else {"kind": str(component.kind)}
        entry |= {name: value for name, value in _given(component).items() if name != "name"}
        if targets := [link.target for link in graph.links if link.source == component.label]:
            entry["links"] = targets
        components[component.label] = entry
    out = {"graph": graph.name, "model": graph.model, "namespace": graph.namespace}
    rest = {"restart": _given(graph.restart), "kubernetes": dict(graph.kubernetes)}
    return out | {"components": components} | {name: value for name, value in rest.items() if value}


def _given(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, which all have, as plain values."""
    defaults = type(value)()
    names = [f.name for f in fields(value)]
    return {name: _plain(mine) for name in names if (mine := getattr(value, name)) != getattr(defaults, name)}


def _plain(value: Any) -> Any:
    if isinstance(value, Limits):
        return _given(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    # A URL that hides its password when shown must not be hidden here.
    return str(value) if isinstance(value, str) else value


# One component.


def _component(name: str, raw: Any, defaults: Mapping[str, Any]) -> tuple[Component, list[str]]:
    where = f"components.{name}"
    data = _mapping(raw, where)
    kind = _kind(name, data.pop("kind", None))
    cls = COMPONENTS[kind]
    links = _names(data.pop("links", None), f"links of {where}")
    known = tuple(f.name for f in fields(cls) if f.name != "name")
    own = _fields(data, where, known, extra=("kind", "links"))
    values = _merged(defaults, own) if issubclass(cls, Workers) else own
    return cls(name="" if name == kind else name, **values), links


def _kind(name: str, given: Any) -> Kind:
    kinds = [str(kind) for kind in Kind]
    if given is not None:
        return Kind(_parsed(layered.choice(*kinds), given, f"kind of components.{name}"))
    if name not in kinds:
        raise SettingsError(
            f"components.{name} names no kind of component{nearest(name, kinds)}; "
            f"add kind: with one of {', '.join(kinds)}."
        )
    return Kind(name)


def _merged(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Lists follow each other, mappings are merged, for the rest the component's own goes first."""
    out = dict(defaults)
    for name, value in own.items():
        before = out.get(name)
        if isinstance(value, tuple) and isinstance(before, tuple):
            out[name] = before + value
        elif isinstance(value, dict) and isinstance(before, dict):
            out[name] = before | value
        else:
            out[name] = value
    return out


def _fields(raw: Any, where: str, known: Sequence[str], *, extra: Sequence[str] = ()) -> dict[str, Any]:
    """The values of the named fields that are given, parsed."""
    data = check_keys(_mapping(raw, where), [*known, *extra], where)
    return {name: _FIELDS[name](value, f"{name} of {where}") for name, value in data.items() if value is not None}


def _parsed(parse: Callable[[Any], Any], raw: Any, where: str) -> Any:
    try:
        return parse(raw)
    except (ValueError, TypeError) as e:
        raise SettingsError(f"{where} {e}.") from None


def _mapping(raw: Any, where: str) -> dict[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise SettingsError(f"{where} must hold keys and values, got {raw!r}.")
    return {str(key): value for key, value in raw.items()}


def _names(raw: Any, where: str) -> list[str]:
    items = [raw] if isinstance(raw, str) else raw if raw is not None else []
    if not isinstance(items, Sequence) or not all(isinstance(item, str) and item for item in items):
        raise SettingsError(f"{where} must be a list of names, got {raw!r}.")
    return list(items)


def _args(raw: Any, where: str) -> tuple[str, ...]:
    """A list of arguments, or a mapping of options to values: true is an option without one, a list repeats none."""
    if isinstance(raw, Mapping):
        out: list[str] = []
        for key, value in raw.items():
            flag = f"--{str(key).lstrip('-')}"
            if value is True:
                out.append(flag)
            elif value is False:
                out.append(f"--no-{flag[2:]}")
            elif value is not None:
                values = value if isinstance(value, list) else [value]
                out += [flag, *(_text(each, f"{key} in {where}") for each in values)]
        return tuple(out)
    if isinstance(raw, list):
        return tuple(_text(each, where) for each in raw)
    raise SettingsError(f"{where} must be a list of arguments or a mapping of options to values, got {raw!r}.")


def _text(raw: Any, where: str) -> str:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        # YAML has many words for true and false.
        quotes = "; write it in quotes if it is a text" if isinstance(raw, bool) else ""
        raise SettingsError(f"{where} must be a text or a number, got {raw!r}{quotes}.")
    return str(raw)


def _env(raw: Any, where: str) -> dict[str, str]:
    return {name: _text(value, f"{name} in {where}") for name, value in _mapping(raw, where).items()}


def _record(cls: type[Any], raw: Any, where: str) -> Any:
    """A dataclass of numbers."""
    data = check_keys(_mapping(raw, where), [f.name for f in fields(cls)], where)
    whole = {f.name: isinstance(f.default, int) for f in fields(cls)}
    values = {
        name: _parsed(layered.integer(0) if whole[name] else layered.number(0), value, f"{name} of {where}")
        for name, value in data.items()
    }
    return cls(**values)


def _as(parse: Callable[[Any], Any]) -> Callable[[Any, str], Any]:
    return lambda raw, where: _parsed(parse, raw, where)


_FIELDS: Mapping[str, Callable[[Any, str], Any]] = {
    "settings": _mapping,
    "args": _args,
    "env": _env,
    "secrets": lambda raw, where: tuple(_names(raw, where)),
    "count": _as(layered.integer(0, 10_000)),
    "host": _as(layered.text),
    "port": _as(layered.integer(0, 65535)),
    "url": _as(parsers.store_url),
    "model": _as(layered.text),
    "gpus": _as(layered.number(0, exclusive=True, high=1024)),
    "cores": _as(layered.integer(1, 1024)),
    "kv_blocks": _as(layered.integer(2, 1 << 30)),
    "limits": lambda raw, where: _record(Limits, raw, where),
    "ready_s": _as(layered.number(1, high=86400)),
}


def _substituted(data: Any, where: str, environ: Mapping[str, str]) -> Any:
    """`data` with the variables in every text replaced."""

    def value_of(match: re.Match[str]) -> str:
        name, otherwise = match.groups()
        if name is None:
            return "$"
        if not (value := environ.get(name, "")) and otherwise is None:
            raise SettingsError(
                f"{where} uses ${{{name}}}, and that variable is not set; set it, or write ${{{name}:-VALUE}}."
            )
        return value or str(otherwise or "")

    if isinstance(data, str):
        return _VARIABLE.sub(value_of, data)
    if isinstance(data, dict):
        return {key: _substituted(value, f"{where}: {key}", environ) for key, value in data.items()}
    if isinstance(data, list):
        return [_substituted(value, where, environ) for value in data]
    return data
