"""Packages read from their source files by syntax tree alone; nothing of them is imported or run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.contract.class_scan import ClassScan, FunctionNode, assigned_names, scan_class, signature_of, statements
from tests.contract.shapes import Kind, Member, Missing, Parameter, Signature, Thing


@dataclass(frozen=True, slots=True)
class ClassSource:
    """A class and the module that defines it."""

    module: str
    node: ast.ClassDef = field(compare=False, hash=False)
    name: str

    @property
    def where(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class FunctionSource:
    module: str
    node: FunctionNode


@dataclass(frozen=True, slots=True)
class ValueSource:
    """A module-level object; `annotation` is None when its type is not stated."""

    module: str
    annotation: ast.expr | None


@dataclass(frozen=True, slots=True)
class ModuleSource:
    module: str


@dataclass(frozen=True, slots=True)
class Foreign:
    """Something of a package that is not in the tree."""

    name: str


Found = ClassSource | FunctionSource | ValueSource | ModuleSource | Foreign


@dataclass(frozen=True, slots=True)
class _Import:
    module: str
    name: str | None


@dataclass(frozen=True, slots=True)
class _Module:
    tree: ast.Module
    bindings: dict[str, _Import | ast.stmt]
    stars: list[str]
    offered: frozenset[str]
    """Names that a module-level `__getattr__` answers to."""


class SourceTree:
    """Packages by import name, each with the folder that holds it.

    Args:
        roots: import name of a package to its folder; a longer name wins over a shorter one.
        aliases: (module, name) to the (module, name) it stands for, where a module hands out names dynamically.
    """

    def __init__(self, roots: Mapping[str, Path], aliases: Mapping[tuple[str, str], tuple[str, str]] | None = None):
        self._roots = dict(sorted(roots.items(), key=lambda item: -len(item[0])))
        self._aliases = dict(aliases or {})
        self._modules: dict[str, _Module | None] = {}
        # By node, so that classes of the same name in different modules are told apart.
        self._scans: dict[ast.ClassDef, ClassScan] = {}
        self._class_members_of: dict[ast.ClassDef, dict[str, Member]] = {}

    def has_module(self, module: str) -> bool:
        return self._file(module) is not None

    def modules(self, package: str) -> Iterator[str]:
        """Dotted names of all modules under a root, sub-packages with a root of their own left out."""
        folder = self._roots[package]
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            dotted = ".".join((package, *parts))
            if self._root_of(dotted) == package:
                yield dotted

    def names(self, module: str) -> list[str]:
        """Names that a module's own statements bind."""
        parsed = self._parse(module)
        return list(parsed.bindings) if parsed is not None else []

    def tree_of(self, module: str) -> ast.Module:
        parsed = self._parse(module)
        assert parsed is not None, module
        return parsed.tree

    def resolve(self, module: str, name: str, _seen: frozenset[tuple[str, str]] = frozenset()) -> Found | None:
        """What `name` of `module` is, followed through re-exports; None when there is no such name."""
        if (module, name) in _seen:
            return None
        seen = _seen | {(module, name)}
        if (module, name) in self._aliases:
            return self.resolve(*self._aliases[module, name], seen)
        parsed = self._parse(module)
        if parsed is None:
            return None
        binding = parsed.bindings.get(name)
        if isinstance(binding, _Import):
            return self._follow(binding, seen)
        if isinstance(binding, ast.ClassDef):
            return ClassSource(module, binding, name)
        if isinstance(binding, FunctionNode):
            return FunctionSource(module, binding)
        if isinstance(binding, ast.Assign) and isinstance(binding.value, ast.Name | ast.Attribute):
            return self.resolve_expr(module, binding.value, seen) or ValueSource(module, None)
        if binding is not None:
            return ValueSource(module, binding.annotation if isinstance(binding, ast.AnnAssign) else None)
        if name in parsed.offered:
            return ValueSource(module, None)
        if self.has_module(f"{module}.{name}"):
            return ModuleSource(f"{module}.{name}")
        for star in parsed.stars:
            if (found := self.resolve(star, name, seen)) is not None:
                return found
        return None

    def resolve_expr(
        self, module: str, node: ast.expr, _seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Found | None:
        """What `Name`, `package.Name`, `Name[T]` or "Name" stands for inside `module`."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.resolve_expr(module, ast.parse(node.value, mode="eval").body, _seen)
        if isinstance(node, ast.Subscript):
            return self.resolve_expr(module, node.value, _seen)
        if isinstance(node, ast.Name):
            return self.resolve(module, node.id, _seen) or Foreign(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.resolve_expr(module, node.value, _seen)
            if isinstance(owner, ModuleSource):
                return self.resolve(owner.module, node.attr, _seen)
            if isinstance(owner, Foreign):
                return Foreign(f"{owner.name}.{node.attr}")
        return None

    def mro(self, cls: ClassSource) -> tuple[list[ClassSource], list[str]]:
        """The class and its bases in the order Python looks them up, and the names of bases outside the tree."""
        foreign: list[str] = []
        return self._linearize(cls, foreign, frozenset()), foreign

    def scan(self, cls: ClassSource) -> ClassScan:
        """What the body of the class itself defines."""
        if cls.node not in self._scans:
            self._scans[cls.node] = scan_class(cls.node)
        return self._scans[cls.node]

    def members(self, found: Found) -> Mapping[str, Member]:
        """All members, inherited ones too; a function's only member is `__call__`."""
        if isinstance(found, FunctionSource):
            signature = signature_of(found.node, drop_first=False)
            return {"__call__": Member("__call__", signature)}
        if isinstance(found, ClassSource):
            return self._class_members(found)
        if isinstance(found, ModuleSource):
            return self._module_members(found.module)
        if isinstance(found, ValueSource) and found.annotation is not None:
            typed = self.resolve_expr(found.module, found.annotation)
            return self._class_members(typed) if isinstance(typed, ClassSource) else {}
        return {}

    def _class_members(self, cls: ClassSource) -> Mapping[str, Member]:
        if cls.node not in self._class_members_of:
            self._class_members_of[cls.node] = self._with_inherited(cls)
        return self._class_members_of[cls.node]

    def _with_inherited(self, cls: ClassSource) -> dict[str, Member]:
        members: dict[str, Member] = {}
        fields: dict[str, Parameter] = {}
        order, _ = self.mro(cls)
        for base in reversed(order):
            scan = self.scan(base)
            members |= {n: m for n, m in scan.members.items() if not (m.declared_only and n in members)}
            if scan.fields is not None:
                fields |= {p.name: p for p in scan.fields}
                if "__init__" not in scan.members:
                    members["__init__"] = Member("__init__", _constructor(fields))
        return members

    def _module_members(self, module: str) -> dict[str, Member]:
        parsed = self._parse(module)
        assert parsed is not None
        out: dict[str, Member] = {}
        for name in [*parsed.bindings, *parsed.offered]:
            found = self.resolve(module, name)
            called = self.members(found).get("__call__") if isinstance(found, FunctionSource) else None
            out[name] = Member(name, called.signature if called else None)
        return out

    def _linearize(self, cls: ClassSource, foreign: list[str], above: frozenset[str]) -> list[ClassSource]:
        """C3, as Python does it; bases outside the tree are left out."""
        rows: list[list[ClassSource]] = []
        direct: list[ClassSource] = []
        for node in cls.node.bases:
            base = self.resolve_expr(cls.module, node)
            if isinstance(base, ClassSource) and base.where not in above:
                direct.append(base)
                rows.append(self._linearize(base, foreign, above | {cls.where}))
            else:
                foreign.append(base.name if isinstance(base, Foreign) else ast.unparse(node))
        rows.append(direct)
        out = [cls]
        while rows := [row for row in rows if row]:
            heads = [row[0] for row in rows]
            head = next((h for h in heads if not any(h in row[1:] for row in rows)), heads[0])
            out.append(head)
            rows = [[c for c in row if c != head] for row in rows]
        return out

    def _follow(self, binding: _Import, seen: frozenset[tuple[str, str]]) -> Found | None:
        if self._root_of(binding.module) is None:
            return Foreign(binding.module + (f".{binding.name}" if binding.name else ""))
        if binding.name is not None:
            return self.resolve(binding.module, binding.name, seen)
        return ModuleSource(binding.module) if self.has_module(binding.module) else None

    def _root_of(self, module: str) -> str | None:
        return next((r for r in self._roots if module == r or module.startswith(f"{r}.")), None)

    def _file(self, module: str) -> Path | None:
        root = self._root_of(module)
        if root is None:
            return None
        path = self._roots[root].joinpath(*module.removeprefix(root).strip(".").split("."))
        for candidate in (path.with_suffix(".py") if module != root else path / "__init__.py", path / "__init__.py"):
            if candidate.is_file():
                return candidate
        # A folder without __init__.py is a namespace package: no names, but its submodules exist.
        return None

    def _parse(self, module: str) -> _Module | None:
        if module not in self._modules:
            path = self._file(module)
            if path is None:
                self._modules[module] = None
            else:
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
                self._modules[module] = _scan_module(tree, package)
        return self._modules[module]


class SourceView:
    """A vLLM as its source states it; `label` names it in sentences."""

    def __init__(self, tree: SourceTree, label: str) -> None:
        self.tree = tree
        self.label = label

    def find(self, module: str, name: str) -> Thing | Missing:
        found = self.tree.resolve(module, name)
        if found is None:
            return Missing.NAME if self.tree.has_module(module) else Missing.MODULE
        return Thing(f"{module}.{name}", self.tree.members(found))


def _constructor(fields: Mapping[str, Parameter]) -> Signature:
    ordered = list(fields.values())
    return (
        *(p for p in ordered if p.kind is Kind.POSITIONAL),
        *(p for p in ordered if p.kind is not Kind.POSITIONAL),
    )


def _scan_module(tree: ast.Module, package: str) -> _Module:
    bindings: dict[str, _Import | ast.stmt] = {}
    stars: list[str] = []
    for statement in statements(tree.body):
        if isinstance(statement, ast.ClassDef | FunctionNode):
            bindings[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            bindings |= dict.fromkeys(assigned_names(statement.targets), statement)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            bindings[statement.target.id] = statement
        elif isinstance(statement, ast.Import):
            for name in statement.names:
                whole = name.name if name.asname else name.name.partition(".")[0]
                bindings[name.asname or whole] = _Import(whole, None)
        elif isinstance(statement, ast.ImportFrom):
            source = _absolute(statement, package)
            for name in statement.names:
                if name.name == "*":
                    stars.append(source)
                else:
                    bindings[name.asname or name.name] = _Import(source, name.name)
    return _Module(tree, bindings, stars, _offered(bindings))


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - statement.level + 1]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


def _offered(bindings: Mapping[str, _Import | ast.stmt]) -> frozenset[str]:
    """Names that `__getattr__` compares against, directly or through a module-level list or dict of names."""
    function = bindings.get("__getattr__")
    if not isinstance(function, FunctionNode):
        return frozenset()
    compared = [c for node in ast.walk(function) if isinstance(node, ast.Compare) for c in node.comparators]
    names: set[str] = set()
    for node in compared:
        if isinstance(node, ast.Name):
            table = bindings.get(node.id)
            value = table.value if isinstance(table, ast.Assign | ast.AnnAssign) else None
        else:
            value = node
        names |= set(_strings(value))
    return frozenset(names)


def _strings(node: ast.expr | None) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        for element in node.elts:
            yield from _strings(element)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            yield from _strings(key)
