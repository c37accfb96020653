"""Members of one class as its body states them, read from the syntax tree. Bases are somebody else's concern."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tests.contract.shapes import Kind, Member, Parameter, Signature

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

# Decorators that write `__init__` from the annotations; `config` is vLLM's own form of dataclass.
_DATACLASS_DECORATORS = {"dataclass", "config"}


@dataclass(frozen=True, slots=True)
class ClassScan:
    """What one class body defines.

    Attributes:
        members: by name, those that its own methods assign to `self` included.
        fields: constructor parameters in order if the class is a dataclass or NamedTuple, else None.
    """

    members: dict[str, Member]
    fields: tuple[Parameter, ...] | None


def scan_class(node: ast.ClassDef) -> ClassScan:
    """Read a class body, conditional parts included."""
    decorated = _DATACLASS_DECORATORS & {last_name(d) for d in node.decorator_list}
    generated = bool(decorated) or any(last_name(base) == "NamedTuple" for base in node.bases)
    members: dict[str, Member] = {}
    fields: list[Parameter] = []
    keyword_only = any(_is_true(d, "kw_only") for d in node.decorator_list)
    for statement in statements(node.body):
        if isinstance(statement, FunctionNode):
            _add_function(statement, members)
        elif isinstance(statement, ast.ClassDef):
            members[statement.name] = Member(statement.name)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            members[name] = Member(name, declared_only=statement.value is None and not generated)
            if last_name(statement.annotation) == "KW_ONLY":
                keyword_only = True
            elif generated and (parameter := _field(statement, keyword_only)):
                fields.append(parameter)
        elif isinstance(statement, ast.Assign):
            for name in assigned_names(statement.targets):
                source = statement.value.id if isinstance(statement.value, ast.Name) else ""
                members[name] = replace(members[source], name=name) if source in members else Member(name)
    for name in _instance_attributes(node):
        if name not in members or members[name].declared_only:
            members[name] = Member(name)
    return ClassScan(members, tuple(fields) if generated else None)


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, those inside `if`, `try`, `with` and loops too, in order."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.For | ast.While):
            yield from statements([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.With):
            yield from statements(statement.body)
        elif isinstance(statement, ast.Try):
            # Handlers first: what the `try` itself binds is the ordinary case and wins.
            handlers = [s for handler in statement.handlers for s in handler.body]
            yield from statements([*handlers, *statement.body, *statement.orelse, *statement.finalbody])


def signature_of(node: FunctionNode, *, drop_first: bool) -> Signature:
    """Parameters of a `def`, without the first one (self or cls) if `drop_first`."""
    args = node.args
    ordered = [*args.posonlyargs, *args.args]
    required = len(ordered) - len(args.defaults)
    out = [Parameter(a.arg, Kind.POSITIONAL, i < required) for i, a in enumerate(ordered)]
    out = out[1:] if drop_first else out
    if args.vararg:
        out.append(Parameter(args.vararg.arg, Kind.VAR_POSITIONAL, False))
    out += [
        Parameter(a.arg, Kind.KEYWORD_ONLY, default is None)
        for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        out.append(Parameter(args.kwarg.arg, Kind.VAR_KEYWORD, False))
    return tuple(out)


def last_name(node: ast.expr) -> str:
    """`dataclass` of `@dataclasses.dataclass(frozen=True)`, `Generic` of `Generic[T]`, or ""."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def assigned_names(targets: Iterable[ast.expr]) -> Iterator[str]:
    """Plain names among assignment targets, inside tuples too."""
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Tuple | ast.List):
            yield from assigned_names(target.elts)


def receiver(node: FunctionNode) -> str:
    """Name of the first parameter of a method (`self`, `cls`), "" for a static method."""
    ordered = [*node.args.posonlyargs, *node.args.args]
    static = "staticmethod" in {last_name(d) for d in node.decorator_list}
    return ordered[0].arg if ordered and not static else ""


def methods(node: ast.ClassDef) -> Iterator[FunctionNode]:
    for statement in statements(node.body):
        if isinstance(statement, FunctionNode):
            yield statement


def _add_function(node: FunctionNode, members: dict[str, Member]) -> None:
    decorators = {last_name(d) for d in node.decorator_list}
    if decorators & {"setter", "deleter"} and node.name in members:
        return
    is_property = any("property" in d for d in decorators)
    signature = None if is_property else signature_of(node, drop_first="staticmethod" not in decorators)
    abstract = any("abstract" in d for d in decorators)
    members[node.name] = Member(node.name, signature, abstract=abstract, is_property=is_property)


def _instance_attributes(node: ast.ClassDef) -> Iterator[str]:
    for method in methods(node):
        first = receiver(method)
        for inner in ast.walk(method):
            if (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == first
            ):
                yield inner.attr


def _field(statement: ast.AnnAssign, keyword_only: bool) -> Parameter | None:
    assert isinstance(statement.target, ast.Name)
    if last_name(statement.annotation) == "ClassVar":
        return None
    required = statement.value is None
    if isinstance(statement.value, ast.Call) and last_name(statement.value) in ("field", "Field"):
        words = {k.arg: k.value for k in statement.value.keywords}
        init = words.get("init")
        if isinstance(init, ast.Constant) and init.value is False:
            return None
        required = not (statement.value.args or {"default", "default_factory"} & set(words))
        keyword_only = keyword_only or _is_true(statement.value, "kw_only")
    kind = Kind.KEYWORD_ONLY if keyword_only else Kind.POSITIONAL
    return Parameter(statement.target.id, kind, required)


def _is_true(node: ast.expr, keyword: str) -> bool:
    return isinstance(node, ast.Call) and any(
        k.arg == keyword and isinstance(k.value, ast.Constant) and k.value.value is True for k in node.keywords
    )
