"""A model's chat template, rendered as Hugging Face's `apply_chat_template` does, without transformers.

Rendering costs about 50 us for a conversation of 30 KB.

Only templates that workers published are rendered: a template in a request could keep the event loop busy.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
import msgspec

from vllm_pd.router.template_environment import TemplateEnvironment, is_name

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


Message = dict[str, Any]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class TemplateFailed(ValueError):
    """The template refuses these messages, or is not valid."""


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

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        env = TemplateEnvironment()
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = _strftime_now
        try:
            self._template = env.from_string(source)
            # jinja2's own is a ChainMap, which every rendering copies key by key: a third of its time.
            self._template.globals = dict(self._template.globals)
            tree = env.parse(source)
            self._variables = jinja2.meta.find_undeclared_variables(tree)
        except jinja2.TemplateError as e:
            raise TemplateFailed(str(e)) from None
        self._tokens = dict(tokens)
        self.source = source
        self.may_loop_over_content = _may_loop_over_content(tree)
        """Whether it may be made for messages whose content is a list of parts."""

    def accepts(self, variable: str) -> bool:
        """Whether the template reads `variable`."""
        return variable in self._variables

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        documents: list[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] = _NOTHING,
    ) -> str:
        """The prompt's text.

        Args:
            continue_final_message: leave the last message open, for the model to go on with.
            extra: further variables; those that the template does not read are left out.

        Raises:
            TemplateFailed: the template refused, or met something it cannot handle.
        """
        ending = ""
        if continue_final_message:
            if add_generation_prompt:
                raise TemplateFailed("continue_final_message and add_generation_prompt exclude each other")
            if "content" not in self.source:
                raise TemplateFailed("the template reads no content")
            last, ending = _left_open(messages[-1])
            messages = [*messages[:-1], last]
        context: dict[str, Any] = {**self._tokens, **{k: v for k, v in extra.items() if self.accepts(k)}}
        context.update(messages=messages, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt)
        try:
            text = self._template.render(context)
        except Exception as e:  # a template is a program and can raise anything
            raise TemplateFailed(str(e)) from None
        return _cut_at_mark(text, ending) if continue_final_message else text


def _may_loop_over_content(tree: jinja2.nodes.Template) -> bool:
    parameters = {name.name for macro in tree.find_all(jinja2.nodes.Macro) for name in macro.args}
    for loop in tree.find_all(jinja2.nodes.For):
        names = {node.name for node in (loop.iter, *loop.iter.find_all(jinja2.nodes.Name)) if is_name(node)}
        if "content" in names or names & parameters or _reads_content(loop.iter):
            return True
    return False


def _reads_content(node: jinja2.nodes.Node) -> bool:
    if isinstance(node, jinja2.nodes.Getattr) and node.attr == "content":
        return True
    if isinstance(node, jinja2.nodes.Const) and node.value == "content":
        return True
    return any(map(_reads_content, node.iter_child_nodes()))


# A message that is to be continued is marked at its end, and the text is cut at the mark: what a template puts after
# it depends on the template. The mark is Hugging Face's: a template that looks at the text sees the same one.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def _left_open(message: Message) -> tuple[Message, str]:
    """The marked message, and the text that was marked."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _MARK}, content
    content = content or []
    for index in reversed(range(len(content))):
        text = content[index].get("text")
        if text is not None:
            part = {**content[index], "text": text + _MARK}
            return {**message, "content": [*content[:index], part, *content[index + 1 :]]}, text
    raise TemplateFailed("the last message has no text to continue")


def _cut_at_mark(text: str, ending: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0 or ending.strip() not in text:
        raise TemplateFailed("the template left out some of the last message")
    kept = text[:at]
    # Without its space the mark was trimmed, and so is what comes before it.
    return kept if text.startswith(_MARK, at) else kept.rstrip()
