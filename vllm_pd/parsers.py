"""Values that both worker and router settings have: how each is read, in one place.

Like the parsers of `layered`, each raises ValueError with a phrase that completes "NAME ...".
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from vllm_pd import layered
from vllm_pd.errors import SettingsError
from vllm_pd.state.keys import NAMESPACE
from vllm_pd.state.store_url import parse_store_url


def store_url(raw: Any) -> layered.SecretUrl:
    """URL of a Redis-compatible store."""
    url = layered.text(raw)
    try:
        parse_store_url(url)
    except SettingsError as e:
        sentence = str(e).removesuffix(".")
        raise ValueError(f"cannot be used: {sentence[0].lower()}{sentence[1:]}") from None
    return layered.SecretUrl(url)


def namespace(raw: Any) -> str:
    """Name of a cluster, part of every key of the store."""
    name = layered.text(raw)
    if not NAMESPACE.fullmatch(name):
        raise ValueError(f"must be 1 to 64 letters, digits, dots, dashes or underscores, got {name!r}")
    return name


def base_url(raw: Any) -> str:
    """Base URL of a worker, without a trailing slash. It names the worker in metrics and logs: no user, no password."""
    url = layered.text(raw).rstrip("/")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
        valid = valid and "@" not in parts.netloc
        _ = parts.port
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"must be http://HOST:PORT or https://HOST:PORT without a user, got {layered.redact(url)!r}")
    return url
