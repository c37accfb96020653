"""Finds the files that a router needs to tokenize as the worker does, on disk only: nothing is downloaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from vllm_pd.state.base import TokenizerFiles

logger = logging.getLogger("vllm.vllm_pd")


def load_tokenizer_files(tokenizer: str, revision: str | None, chat_template: str | None) -> TokenizerFiles | None:
    """Read the files of a local folder or of the Hugging Face cache.

    Args:
        tokenizer: folder, or the name of a repository whose files vLLM has already downloaded.
        revision: branch, tag or commit of the repository; None is "main".
        chat_template: Jinja source that the server was told to use instead of the model's own.

    Returns:
        None when the model has no `tokenizer.json`, or when vLLM reads it with another tokenizer (Mistral's).
    """
    path = _find(tokenizer, revision, "tokenizer.json")
    if path is None or _find(tokenizer, revision, "tekken.json") is not None:
        logger.debug("no tokenizer.json of %s to publish", tokenizer)
        return None
    config = _read(_find(tokenizer, revision, "tokenizer_config.json"))
    if chat_template is None:
        chat_template = _own_template(tokenizer, revision, config)
    return TokenizerFiles(path.read_bytes(), config, chat_template)


def _own_template(tokenizer: str, revision: str | None, config: bytes) -> str:
    """The model's template, looked for in the order in which vLLM does: of its processor, then of its tokenizer."""
    for name in ("chat_template.json", "processor_config.json"):
        if template := _template_in(_read(_find(tokenizer, revision, name))):
            return template
    if jinja := _read(_find(tokenizer, revision, "chat_template.jinja")):
        return jinja.decode("utf-8", "replace")
    return _template_in(config)


def _template_in(data: bytes) -> str:
    """Field `chat_template` of a JSON file: a text, or a list of named ones of which "default" counts."""
    try:
        value = json.loads(data or b"{}").get("chat_template")
    except (ValueError, AttributeError):
        return ""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _find(tokenizer: str, revision: str | None, name: str) -> Path | None:
    folder = Path(tokenizer)
    if folder.is_dir():
        path = folder / name
        return path if path.is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(tokenizer, name, revision=revision)
    except (ImportError, ValueError):
        # ValueError: neither a folder nor a possible repository name (an object-store address, say).
        return None
    return Path(found) if isinstance(found, str) else None


def _read(path: Path | None) -> bytes:
    return path.read_bytes() if path is not None else b""
