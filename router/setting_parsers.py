"""How the router's own settings are read. Like the parsers of `layered`, each raises ValueError with a phrase that
completes "NAME ...".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_pd import layered, parsers
from vllm_pd.router.static_probe import StaticWorker
from vllm_pd.state.base import Role

AUTO = "auto"

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]{1,64}")


def tokens_or_auto(raw: Any) -> int | str:
    """A number of tokens, or `AUTO`."""
    if raw == AUTO:
        return AUTO
    try:
        return layered.integer(0)(raw)
    except ValueError as e:
        raise ValueError(f"{e}, or auto") from None


def key(raw: Any) -> str:
    """An API key. The errors do not show it."""
    text = layered.text(raw)
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("must be printable ASCII without spaces")
    return text


def _static_worker(raw: Any) -> StaticWorker:
    url, _, role = layered.text(raw).rpartition("=")
    if "@" in url:
        # The URL names the worker in metrics and on the ready page.
        raise ValueError(f"must not hold a user or password, got {layered.redact(url)!r}; use --worker-api-key")
    try:
        url = parsers.base_url(url)
    except ValueError:
        raise ValueError(f"must be URL=role, for example http://10.0.0.5:8000=decode, got {raw!r}") from None
    return StaticWorker(url, Role(layered.choice(*Role)(role)))


def static_workers(raw: Any) -> tuple[StaticWorker, ...]:
    """A list of `URL=role`, a text of them separated by commas or spaces, or a mapping of URL to role."""
    if isinstance(raw, Mapping):
        items: list[Any] = [f"{url}={role}" for url, role in raw.items()]
    elif isinstance(raw, str):
        items = raw.replace(",", " ").split()
    elif isinstance(raw, list | tuple):
        items = list(raw)
    else:
        raise ValueError(f"must be a list of URL=role, got {raw!r}")
    workers = tuple(_static_worker(item) for item in items)
    if len({worker.id for worker in workers}) != len(workers):
        raise ValueError("names one host and port twice; keep one role for each")
    return workers


def numbers_by_name(raw: Any) -> tuple[tuple[str, float], ...]:
    """A list of `NAME=VALUE`, a text of them separated by commas or spaces, or a mapping of name to value."""
    if isinstance(raw, Mapping):
        items: list[tuple[str, Any]] = [(str(name), value) for name, value in raw.items()]
    else:
        texts = raw.replace(",", " ").split() if isinstance(raw, str) else list(raw)
        items = [(str(name), value) for name, _, value in (layered.text(item).partition("=") for item in texts)]
    parse = layered.number(0, high=1e6)
    try:
        return tuple((name, parse(value)) for name, value in items)
    except ValueError:
        raise ValueError(f"must be NAME=VALUE with values of at least 0, got {raw!r}") from None


def header_name(raw: Any) -> str:
    """Name of an HTTP header, in lower case."""
    name = layered.text(raw).lower()
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError(f"must be the name of a header, got {raw!r}")
    return name


def existing_path(raw: Any) -> str:
    """A file or folder."""
    path = layered.text(raw)
    if not Path(path).exists():
        raise ValueError(f"must be a file or folder that exists, got {path!r}")
    return path
