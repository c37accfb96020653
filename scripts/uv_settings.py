"""What pip is configured with on this machine, said to uv: uv reads neither pip's files nor its variables.

A mirror, a folder of wheels or a constraint that pip was told of holds for `make install` as well, whichever of the two
does it. What uv has no word for is no reason to leave it out: then pip does it. All of it goes by variables, because a
mirror's address may hold a password, and a command line is seen by others and written to the log.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

_VARIABLES: dict[str, tuple[str, Callable[[list[str]], str]]] = {
    "index-url": ("UV_DEFAULT_INDEX", "".join),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " ".join),
    "find-links": ("UV_FIND_LINKS", ",".join),
    "constraint": ("UV_CONSTRAINT", " ".join),
    "trusted-host": ("UV_INSECURE_HOST", " ".join),
    "cert": ("SSL_CERT_FILE", " ".join),
    "proxy": ("ALL_PROXY", "".join),
    "timeout": ("UV_HTTP_TIMEOUT", "".join),
    "default-timeout": ("UV_HTTP_TIMEOUT", "".join),
}
"""The variable of uv's for a setting of pip's, and how it is written there. pip parts values at white space."""
_SAME_TO_US = frozenset(
    {
        "break-system-packages",
        "cache-dir",
        "compile",
        "disable-pip-version-check",
        "format",
        "log",
        "no-cache-dir",
        "no-color",
        "no-compile",
        "no-input",
        "no-python-version-warning",
        "no-warn-script-location",
        "prefer-binary",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "retries",
        "root-user-action",
        "verbose",
    }
)
"""Settings of pip that change how it looks or where it keeps copies, and not what is installed."""
_SECTIONS = ("global", "install", ":env:")
"""A later one counts for more."""


class UnknownToUv(Exception):
    """A setting of pip's for which uv has no word."""


def uv_settings(pip_config: str) -> dict[str, str]:
    """The variables that tell uv what `pip config list` printed.

    Raises:
        UnknownToUv: with the setting's name.
    """
    # pip takes a release from whichever index has it; uv would only look at the first that knows the name.
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, value in _settings(pip_config).items():
        if name in _VARIABLES:
            variable, written = _VARIABLES[name]
            found[variable] = written(value.split())
        elif name not in _SAME_TO_US:
            raise UnknownToUv(name)
    return found


def _settings(pip_config: str) -> dict[str, str]:
    sections: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in pip_config.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.strip().rpartition(".")
        if section in sections:
            sections[section][key.replace("_", "-")] = _text(value.strip())
    return {key: value for section in _SECTIONS for key, value in sections[section].items()}


def _text(written: str) -> str:
    """pip writes values as Python does."""
    try:
        return str(ast.literal_eval(written))
    except (ValueError, SyntaxError):
        return written
