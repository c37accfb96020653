"""The sandbox in which chat templates run: Hugging Face's, in less time.

Nearly all that templates do is to read members of messages and of loops. The sandbox has a method for it; here the code
that jinja2 makes of a template reads them itself where the method would give the same.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset(
    {"index", "index0", "first", "last", "length", "revindex", "revindex0", "previtem", "nextitem"}
)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training. It renders to its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration is a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Writes `(x["role"] if type(x) is dict and "role" in x else ...)`, with the method's call as the last part.

    Only for a variable: what stands there several times must cost nothing and change nothing.
    """

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        key = node.arg.value if isinstance(node.arg, jinja2.nodes.Const) else None
        inline = isinstance(key, str) and is_name(node.node)
        if inline:
            self._member(node.node, repr(key), frame)
        super().visit_Getitem(node, frame)
        if inline:
            self.write(")")

    def visit_Getattr(self, node: jinja2.nodes.Getattr, frame: jinja2.compiler.Frame) -> None:
        inline = is_name(node.node) and node.attr not in _DICT_ATTRIBUTES
        if inline and node.attr in _LOOP_ATTRIBUTES:
            self.write("(")
            self.visit(node.node, frame)
            self.write(f".{node.attr} if type(")
            self.visit(node.node, frame)
            self.write(") is LoopContext else ")
        elif inline:
            self._member(node.node, repr(node.attr), frame)
        super().visit_Getattr(node, frame)
        if inline:
            self.write(")")

    def _member(self, variable: jinja2.nodes.Expr, key: str, frame: jinja2.compiler.Frame) -> None:
        self.write("(")
        self.visit(variable, frame)
        self.write(f"[{key}] if type(")
        self.visit(variable, frame)
        self.write(f") is dict and {key} in ")
        self.visit(variable, frame)
        self.write(" else ")


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """As `apply_chat_template` of Hugging Face sets it up, without its filters and functions."""

    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def is_name(node: jinja2.nodes.Node) -> TypeGuard[jinja2.nodes.Name]:
    """Whether it is a variable."""
    return isinstance(node, jinja2.nodes.Name)
