"""Tokenizer files of a model's folder, for routers that are told where to look (`--tokenizer`)."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_pd.errors import SettingsError
from vllm_pd.state.base import TokenizerFiles


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read a model's folder, or its `tokenizer.json` and what lies next to it.

    What only the workers know (their template flags) is left open.

    Raises:
        SettingsError: there is no readable `tokenizer.json`.
    """
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    try:
        tokenizer = file.read_bytes()
    except OSError as e:
        raise SettingsError(f"--tokenizer {path}: {e.strerror}; name a model's folder or its tokenizer.json.") from None
    config = _read(folder / "tokenizer_config.json")
    plain, tools = _templates(folder, config)
    return TokenizerFiles(tokenizer, config, plain, tool_template=tools)


def _templates(folder: Path, config: bytes) -> tuple[str, str]:
    """The model's template and that for tools if it has one ("" where there is none), in vLLM's order of places."""
    for name in ("chat_template.json", "processor_config.json"):
        if template := _named_templates(_read(folder / name)).get("default"):
            return template, ""
    if jinja := _read(folder / "chat_template.jinja"):
        return jinja.decode("utf-8", "replace"), _read(folder / "additional_chat_templates" / "tool_use.jinja").decode()
    named = _named_templates(config)
    return named.get("default", ""), named.get("tool_use", "")


def _named_templates(data: bytes) -> dict[str, str]:
    """Field `chat_template` of a JSON file: a text, which is the default, or a list of named ones."""
    try:
        value = json.loads(data or b"{}").get("chat_template")
    except (ValueError, AttributeError):
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
