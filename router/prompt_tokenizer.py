"""A model's tokenizer and chat templates, made from the files that its workers publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from vllm_pd.router.encoder import NO_IDS, Encoder, TokenIds
from vllm_pd.router.fast_encoder import load_fast
from vllm_pd.router.request_fields import RequestFields
from vllm_pd.router.token_segments import TokenSegments, find_separator
from vllm_pd.router.tokenizer_proof import chats, differing, proof_texts
from vllm_pd.state.base import TokenizerFiles


class PromptTokenizer:
    """What turns a request of one model into token ids. Building one takes up to a second: do it off the event loop.

    Args:
        fast: use fastokens if it is installed and gives the same.

    Raises:
        ValueError: the tokenizer file is unusable.
    """

    def __init__(self, files: TokenizerFiles, *, fast: bool = True) -> None:
        self._tokenizer = _load(files)
        self._drops_unused_tools = files.drops_unused_tools
        self._defaults = _defaults(files.template_kwargs)
        tokens = files.special_tokens or special_tokens(files.tokenizer_config)
        self.template = _Template.of(files.chat_template, files.content_format, tokens)
        self._tool_template = self.template
        if files.tool_template:
            self._tool_template = _Template.of(files.tool_template, files.tool_content_format, tokens)
        proof = proof_texts(self._tokenizer)
        self.encoder = Encoder(self._tokenizer, load_fast(files.tokenizer_json) if fast else None, proof)
        self.segments = TokenSegments(self.encoder, self._separator(proof))
        self._added = self._added_around(proof)

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
        texts: list[str] = []
        for form in template.forms:
            messages = template_messages(chat.messages, form, developer=template.knows_developer)
            try:
                texts.append(
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
        if any(text != texts[0] for text in texts):
            raise PromptUnknown(Unknown.NO_TEMPLATE)
        return texts[0]

    def around(self, *, add_special_tokens: bool) -> tuple[bytes, TokenIds]:
        """What the tokenizer puts in front of a text, as bytes of a `TokenIds`, and behind it.

        Raises:
            PromptUnknown: it does more than that to a text.
        """
        if not add_special_tokens:
            return b"", NO_IDS
        if self._added is None:
            raise PromptUnknown(Unknown.TOKENIZER)
        return self._added

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids, nothing kept and nothing clever."""
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def _separator(self, proof: Sequence[str]) -> str | None:
        """Where to cut chats, if that is known to change nothing."""
        if self.template is None:
            return None
        messages = [{"role": role, "content": "x"} for role in ("user", "assistant") * 3]
        form = self.template.forms[0]
        try:
            sample = self.template.jinja.render(template_messages(messages, form, developer=True))
        except TemplateFailed:
            return None
        separator = find_separator(self._tokenizer.get_added_tokens_decoder().values(), sample)
        if separator is None:
            return None
        segments = TokenSegments(self.encoder, separator)
        texts = ["", *chats(self._tokenizer, separator, proof)]

        def cut(text: str) -> list[int]:
            return [id for piece in segments.cut(text) for id in segments.ids(piece)]

        return separator if differing(texts, self.encoder.exact, cut) is None else None

    def _added_around(self, proof: Sequence[str]) -> tuple[bytes, TokenIds] | None:
        encoded = self._tokenizer.encode("a", add_special_tokens=True)
        ids, mask = encoded.ids, encoded.special_tokens_mask
        inner = [index for index, special in enumerate(mask) if not special]
        if not inner:
            return None
        before, after = ids[: inner[0]], ids[inner[-1] + 1 :]

        def whole(text: str) -> list[int]:
            return self.encode(text, add_special_tokens=True)

        def put_together(text: str) -> list[int]:
            return [*before, *self.encoder.exact(text), *after]

        if differing(proof[::8], whole, put_together) is not None:
            return None
        return TokenIds("I", before).tobytes(), TokenIds("I", after)


def _load(files: TokenizerFiles) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
    except Exception as e:  # the Rust library raises bare Exception
        raise ValueError(f"tokenizer.json cannot be loaded: {e}") from None
    if getattr(tokenizer.model, "dropout", None):
        raise ValueError("the tokenizer draws lots (BPE dropout)")
    if b'"split_special_tokens"' in files.tokenizer_config and _config(files).get("split_special_tokens"):
        raise ValueError("the tokenizer splits special tokens, which is not supported")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _config(files: TokenizerFiles) -> dict[str, Any]:
    try:
        return msgspec.json.decode(files.tokenizer_config, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


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
            forms: tuple[ContentFormat, ...] = (ContentFormat(content_format),)
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
