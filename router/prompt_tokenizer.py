"""A model's tokenizer and chat templates, made from the files that its workers publish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import tokenizers

from vllm_pd.router.chat_template import ChatTemplate, TemplateFailed, special_tokens
from vllm_pd.router.conversation import (
    RESERVED_KWARGS,
    ContentFormat,
    PromptUnknown,
    Unknown,
    read_conversation,
    template_messages,
)
from vllm_pd.router.request_fields import RequestFields
from vllm_pd.state.base import TokenizerFiles


class PromptTokenizer:
    """What turns a request of one model into token ids. Building one takes up to a second: do it off the event loop.

    Raises:
        ValueError: the tokenizer file is unusable.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
        except Exception as e:  # the Rust library raises bare Exception
            raise ValueError(f"tokenizer.json cannot be loaded: {e}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._drops_unused_tools = files.drops_unused_tools
        self._defaults = _defaults(files.template_kwargs)
        tokens = files.special_tokens or special_tokens(files.tokenizer_config)
        self.template = _Template.of(files.chat_template, files.content_format, tokens)
        self._tool_template = self.template
        if files.tool_template:
            self._tool_template = _Template.of(files.tool_template, files.tool_content_format, tokens)

    def render(self, fields: RequestFields) -> str:
        """The text of a chat request's prompt.

        Raises:
            PromptUnknown: it cannot be told exactly.
        """
        if self.template is None or self._defaults is None:
            raise PromptUnknown(Unknown.NO_TEMPLATE)
        chat = read_conversation(fields, self._defaults, drops_unused_tools=self._drops_unused_tools)
        template = self.template if chat.tools is None else self._tool_template
        if template is None:
            raise PromptUnknown(Unknown.NO_TEMPLATE)
        texts = set()
        for form in template.forms:
            messages = template_messages(chat.messages, form, developer=template.knows_developer)
            try:
                texts.add(
                    template.jinja.render(
                        messages,
                        tools=chat.tools,
                        documents=chat.documents,
                        add_generation_prompt=chat.add_generation_prompt,
                        continue_final_message=chat.continue_final_message,
                        extra=chat.kwargs,
                    )
                )
            except TemplateFailed:
                raise PromptUnknown(Unknown.REFUSED) from None
        if len(texts) > 1:
            raise PromptUnknown(Unknown.NO_TEMPLATE)
        return texts.pop()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. About 0.25 ms per KB."""
        # Of the library's calls only those for batches let other threads run.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        """Number of tokens of `text`."""
        return len(self.encode(text, add_special_tokens=add_special_tokens))


class _Template:
    """A template and how messages are handed to it: in one form, or in both if the worker did not say which."""

    def __init__(self, jinja: ChatTemplate, forms: tuple[ContentFormat, ...]) -> None:
        self.jinja = jinja
        self.forms = forms
        self.knows_developer = '"developer"' in jinja.source or "'developer'" in jinja.source

    @classmethod
    def of(cls, source: str, content_format: str, tokens: Mapping[str, str]) -> _Template | None:
        """None when there is no template, or one that only the worker can read."""
        if not source:
            return None
        try:
            jinja = ChatTemplate(source, tokens)
        except TemplateFailed:
            return None
        try:
            forms = (ContentFormat(content_format),)
        except ValueError:
            forms = tuple(ContentFormat) if jinja.may_loop_over_content else (ContentFormat.STRING,)
        return cls(jinja, forms)


def _defaults(text: str) -> Mapping[str, Any] | None:
    """The worker's template kwargs, or None when one of them changes more than a variable."""
    try:
        found = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return found if not found.keys() & RESERVED_KWARGS else None
