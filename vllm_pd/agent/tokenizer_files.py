"""What a router needs to render and tokenize as this server does, taken from the server's own tokenizer.

The files of the model would not do: transformers changes some tokenizers while it loads them, and which template is
served with depends on flags.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_pd import vllm_compat as compat
from vllm_pd.state.base import TokenizerFiles

logger = logging.getLogger("vllm.vllm_pd")

_MODE = "hf"
"""Tokenizer mode whose prompts come from a Jinja template and a tokenizer of the `tokenizers` library."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Flags of the server that decide what its prompts look like.

    Attributes:
        chat_template: `--chat-template`, a file or a literal, as given.
        content_format: `--chat-template-content-format`.
        template_kwargs: `--default-chat-template-kwargs`.
        drops_unused_tools: `--exclude-tools-when-tool-choice-none`.
    """

    chat_template: str | None = None
    content_format: str = "auto"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    drops_unused_tools: bool = False


def served_tokenizer_files(model: Any, rendering: Rendering) -> TokenizerFiles | None:
    """What this server tokenizes and renders with.

    Args:
        model: the started server's `ModelConfig`.

    Returns:
        None when there is no tokenizer that a router could use. Without a template when chats are rendered by code
        instead of one.
    """
    if model.skip_tokenizer_init or compat.tokenizer_args_from_config(model)[0] != _MODE:
        return None
    tokenizer = compat.cached_tokenizer_from_config(model)
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "to_str") or getattr(tokenizer, "split_special_tokens", False):
        logger.debug("the tokenizer of %s is none that a router can use", model.tokenizer)
        return None
    plain, plain_format, tools, tools_format = "", "", "", ""
    if model.hf_config.model_type != "gpt_oss" and not model.enable_prompt_embeds:
        plain, plain_format = _template(tokenizer, model, rendering, None)
        tools, tools_format = _template(tokenizer, model, rendering, [{}])
    return TokenizerFiles(
        tokenizer_json=backend.to_str().encode(),
        chat_template=plain,
        content_format=plain_format,
        tool_template=tools if tools != plain else "",
        tool_content_format=tools_format if tools != plain else "",
        special_tokens=dict(tokenizer.special_tokens_map),
        template_kwargs=json.dumps(dict(rendering.template_kwargs)) if rendering.template_kwargs else "",
        drops_unused_tools=rendering.drops_unused_tools,
    )


def _template(tokenizer: Any, model: Any, rendering: Rendering, tools: list[Any] | None) -> tuple[str, str]:
    """The template for requests with or without tools, and its content format; "" and "" when there is none."""
    # vLLM's own rules for what the flag may be: a file, the name of a built-in template, or a literal.
    given = compat.load_chat_template(rendering.chat_template)
    source = compat.resolve_chat_template(tokenizer, given, tools, model_config=model)
    if not source:
        return "", ""
    form = compat.resolve_chat_template_content_format(
        given, tools, rendering.content_format, tokenizer, model_config=model
    )
    return str(source), str(form)
