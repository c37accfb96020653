"""Reads a YAML file of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vllm_pd.errors import SettingsError


def read_file(path: str, *, flag: str, example: str) -> dict[str, Any]:
    """The keys and values in the file; none for an empty file.

    Args:
        flag: where the user named the file, for the message.
        example: a line that such a file may hold, for the message.

    Raises:
        SettingsError: it cannot be read, is not YAML, or is not a mapping.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise SettingsError(f"The settings file {path} cannot be read ({e.strerror}); check {flag}.") from None
    except (yaml.YAMLError, ValueError) as e:
        # ValueError: bytes that are no UTF-8.
        raise SettingsError(f"The settings file {path} is not valid YAML: {' '.join(str(e).split())}.") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SettingsError(f"The settings file {path} must hold keys and values such as '{example}'.")
    return data
