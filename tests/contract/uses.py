"""What a function of ours uses of vLLM's objects, as far as annotations tell what they are.

Known are: `self` and `super()` in classes with a base of vLLM's, names from vllm_compat, parameters and variables
annotated with a class of vLLM's, and from there every field whose class body states its type.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.contract.class_scan import FunctionNode, last_name, methods, receiver, statements
from tests.contract.shapes import Member, call_refusal
from tests.contract.source import ClassSource, Foreign, Found, FunctionSource, ModuleSource, SourceTree, ValueSource

# Bases outside the tree that add no members a subclass would be asked for.
_EMPTY_BASES = {"ABC", "abc.ABC", "Generic", "typing.Generic", "Protocol", "typing.Protocol", "object"}


@dataclass(frozen=True, slots=True)
class Use:
    """One attribute or call; `problem` is None when it works."""

    where: str
    what: str
    problem: str | None


def uses_of_class(tree: SourceTree, cls: ClassSource) -> Iterator[Use]:
    """Uses in the methods of `cls` and of its bases that are ours, with `self` being a `cls`."""
    order, _ = tree.mro(cls)
    for i, owner in enumerate(order):
        if owner.module.startswith("vllm."):
            continue
        for method in methods(owner.node):
            scope = _Scope(tree, owner.module, method)
            scope.this, scope.this_class, scope.after = receiver(method), cls, order[i + 1 :]
            yield from scope.uses(f"{owner.where}.{method.name}")


def uses_of_module(tree: SourceTree, module: str) -> Iterator[Use]:
    """Uses in every function of a module; `self` is left to `uses_of_class`."""
    for node in ast.walk(tree.tree_of(module)):
        if isinstance(node, FunctionNode):
            yield from _Scope(tree, module, node).uses(f"{module}.{node.name}")


class _Scope:
    """Names inside one function and what they stand for."""

    def __init__(self, tree: SourceTree, module: str, function: FunctionNode) -> None:
        self._tree = tree
        self._module = module
        self._function = function
        self._nodes = list(ast.walk(function))
        self._local: dict[str, Found | None] = {}
        self.this = ""
        self.this_class: ClassSource | None = None
        self.after: list[ClassSource] = []
        self._bind_names()

    def uses(self, where: str) -> Iterator[Use]:
        calls = {id(node.func): node for node in self._nodes if isinstance(node, ast.Call)}
        for node in self._nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield from self._attribute(where, node, calls.get(id(node)))
            elif isinstance(node, ast.Name) and id(node) in calls:
                yield from self._plain_call(where, node, calls[id(node)])

    def _bind_names(self) -> None:
        args = self._function.args
        parameters = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        for parameter in filter(None, parameters):
            self._local[parameter.arg] = self._annotated(parameter.annotation)
        for node in self._nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._local.setdefault(node.id, None)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                for name in node.names:
                    self._local[name.asname or name.name] = self._tree.resolve(node.module, name.name)
        for node in self._nodes:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self._local[node.target.id] = self._annotated(node.annotation)

    def _annotated(self, annotation: ast.expr | None, module: str | None = None) -> Found | None:
        """The class that an annotation names, `None` alternatives left out; None when it is no single class."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            sides = [annotation.left, annotation.right]
            named = [s for s in sides if not (isinstance(s, ast.Constant) and s.value is None)]
            return self._annotated(named[0], module) if len(named) == 1 else None
        if not isinstance(annotation, ast.Name | ast.Attribute):
            return None
        found = self._tree.resolve_expr(module or self._module, annotation)
        return found if isinstance(found, ClassSource) else None

    def _what(self, node: ast.expr) -> Found | None:
        """The class of an expression's value, or the class, module or function that it names."""
        if isinstance(node, ast.Name):
            if node.id == self.this and self.this_class is not None:
                return self.this_class
            if node.id in self._local:
                return self._local[node.id]
            found = self._tree.resolve(self._module, node.id)
        elif isinstance(node, ast.Attribute):
            owner = self._what(node.value)
            if isinstance(owner, ModuleSource):
                found = self._tree.resolve(owner.module, node.attr)
            elif isinstance(owner, ClassSource):
                return self._field(owner, node.attr)
            else:
                return None
        else:
            return None
        if isinstance(found, ValueSource):
            return self._annotated(found.annotation, found.module)
        return None if isinstance(found, Foreign) else found

    def _field(self, owner: ClassSource, name: str) -> Found | None:
        for cls in self._tree.mro(owner)[0]:
            for statement in statements(cls.node.body):
                if isinstance(statement, ast.AnnAssign) and last_name(statement.target) == name:
                    return self._annotated(statement.annotation, cls.module)
        return None

    def _attribute(self, where: str, node: ast.Attribute, call: ast.Call | None) -> Iterator[Use]:
        members = self._members_of(node.value)
        if members is None or (node.attr.startswith("__") and node.attr not in members):
            return
        member = members.get(node.attr)
        if call is not None and self._passes_self(call):
            call = None
        yield Use(where, ast.unparse(node), _problem(member, call))

    def _passes_self(self, call: ast.Call) -> bool:
        """`Base.method(self, ...)`, whose signature we keep without self."""
        first = call.args[0] if call.args else None
        return isinstance(first, ast.Name) and first.id == receiver(self._function) and first.id in ("self", "cls")

    def _members_of(self, node: ast.expr) -> Mapping[str, Member] | None:
        """Members of an expression's value if it is vLLM's or derived from vLLM's and all of them can be seen."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
            if self.this_class is None:
                return None
            members: dict[str, Member] = {}
            for cls in self.after:
                members = {**self._tree.scan(cls).members, **members}
            return members
        found = self._what(node)
        if isinstance(found, ModuleSource) and found.module.startswith("vllm."):
            return self._tree.members(found)
        if not isinstance(found, ClassSource):
            return None
        order, foreign = self._tree.mro(found)
        if not any(c.module.startswith("vllm.") for c in order) or set(foreign) - _EMPTY_BASES:
            return None
        members = self._tree.members(found)
        undefined = {n for n, m in members.items() if m.declared_only and not self._declared_by_vllm(order, n)}
        return None if "__getattr__" in members else {n: m for n, m in members.items() if n not in undefined}

    def _declared_by_vllm(self, order: list[ClassSource], name: str) -> bool:
        return any(c.module.startswith("vllm.") and name in self._tree.scan(c).members for c in order)

    def _plain_call(self, where: str, name: ast.Name, call: ast.Call) -> Iterator[Use]:
        found = self._local[name.id] if name.id in self._local else self._tree.resolve(self._module, name.id)
        if isinstance(found, FunctionSource) and found.module.startswith("vllm."):
            yield Use(where, ast.unparse(name), _problem(self._tree.members(found)["__call__"], call))
        elif isinstance(found, ClassSource) and found.module.startswith("vllm."):
            constructor = self._tree.members(found).get("__init__")
            if constructor is not None:
                yield Use(where, ast.unparse(name), _problem(constructor, call))


def _problem(member: Member | None, call: ast.Call | None) -> str | None:
    if member is None:
        return "does not exist"
    if call is None or member.signature is None:
        return None
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return None
    return call_refusal(member.signature, len(call.args), [k.arg for k in call.keywords if k.arg])
