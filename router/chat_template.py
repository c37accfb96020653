"""A model's chat template, rendered as Hugging Face's `apply_chat_template` does, without transformers.

Only templates that workers published are rendered: a template in a request could keep the event loop busy.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TemplateFailed(ValueError):
    """The template refuses these messages, or is not valid."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training. It renders to its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration is a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which would put other characters into the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def special_tokens(tokenizer_config: bytes) -> dict[str, str]:
    """The special tokens that templates name, from the text of `tokenizer_config.json`; empty if it is unreadable."""
    try:
        config = msgspec.json.decode(tokenizer_config)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    out: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name) if isinstance(config, dict) else None
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            out[name] = value
    return out


class ChatTemplate:
    """One compiled template with the special tokens of its tokenizer.

    Raises:
        TemplateFailed: the source is not a valid template.
    """

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = _strftime_now
        try:
            self._template = env.from_string(source)
            self._variables = jinja2.meta.find_undeclared_variables(env.parse(source))
        except jinja2.TemplateError as e:
            raise TemplateFailed(str(e)) from None
        self._tokens = tokens

    def accepts(self, variable: str) -> bool:
        """Whether the template reads `variable`."""
        return variable in self._variables

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None,
        documents: list[Any] | None,
        add_generation_prompt: bool,
        extra: dict[str, Any],
    ) -> str:
        """The prompt's text. `extra` is what the request adds under `chat_template_kwargs`.

        Raises:
            TemplateFailed: the template refused, or met something it cannot handle.
        """
        context: dict[str, Any] = {**self._tokens, **{k: v for k, v in extra.items() if self.accepts(k)}}
        context.update(messages=messages, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(context)
        except Exception as e:  # a template is a program and can raise anything
            raise TemplateFailed(str(e)) from None
