"""Reads a YAML file of settings, and refuses what YAML takes for something else than it looks like."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from vllm_pd.errors import SettingsError

_MERGE = "tag:yaml.org,2002:merge"
# 010 is 8 to YAML, and 1:30 is 90.
_MISLEADING = re.compile(r"[-+]?0[0-9_]+|.*:.*")


class _Loader(yaml.SafeLoader):
    """Of two equal keys YAML would silently keep the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice; keep one of them", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        is_whole = node.tag.endswith(":int")
        number: int | float = self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)
        if _MISLEADING.fullmatch(node.value):
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{node.value} is the number {number:g} to YAML; write that, or {node.value!r} if it is a text",
                node.start_mark,
            )
        return number


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def parse_yaml(text: str) -> Any:
    """Any value. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def read_file(path: str, *, flag: str, example: str) -> dict[str, Any]:
    """The keys and values in the file; none for an empty file.

    Args:
        flag: where the user named the file, for the message.
        example: a line that such a file may hold, for the message.

    Raises:
        SettingsError: it cannot be read, is not YAML, is misleading, or is not a mapping.
    """
    try:
        data = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise SettingsError(f"The settings file {path} cannot be read ({e.strerror}); check {flag}.") from None
    except yaml.constructor.ConstructorError as e:
        where = f", line {e.problem_mark.line + 1}" if e.problem_mark is not None else ""
        raise SettingsError(f"The settings file {path}{where}: {e.problem}.") from None
    except (yaml.YAMLError, ValueError) as e:
        # ValueError: bytes that are no UTF-8.
        raise SettingsError(f"The settings file {path} is not valid YAML: {' '.join(str(e).split())}.") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SettingsError(f"The settings file {path} must hold keys and values such as '{example}'.")
    return data
