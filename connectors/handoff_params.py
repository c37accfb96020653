"""Whether hand-off parameters can be read by. Pure.

They come over the network from another process, and vLLM takes them as they are: a request with parts missing waits
for its blocks forever, and one with too few blocks ends the engine. One whose prompt has another length there than here
would read other tokens' KV. All these are computed instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the engine that reads expects.

    Attributes:
        tokens: of the prompt that it would read; None if it cannot say.
        groups: how many KV cache groups its model hands over.
        block_size: tokens of a block where every group holds the whole prompt; 0 elsewhere (sliding windows, state).
    """

    tokens: int | None
    groups: int
    block_size: int


def problem(params: Mapping[str, Any], wanted: Wanted) -> str | None:
    """Why nothing can be read by these parameters; None if it can."""
    for name in ("remote_engine_id", "remote_request_id", "remote_host"):
        if not isinstance(params.get(name), str) or not params[name]:
            return f"{name} is missing"
    if not _whole(params.get("remote_port"), 1) or params["remote_port"] > 65535:
        return "remote_port is no port"
    for name in ("tp_size", "dcp_size", "pp_size"):
        if not _whole(params.get(name, 1), 1):
            return f"{name} is no count"
    blocks = params.get("remote_block_ids")
    if not isinstance(blocks, list | tuple) or not all(_are_blocks(group) for group in blocks):
        return "remote_block_ids is no list of lists of block ids"
    if len(blocks) != wanted.groups:
        return f"it has blocks of {len(blocks)} KV cache groups, and there are {wanted.groups} here"
    tokens = params.get("remote_num_tokens")
    if tokens is not None and wanted.tokens is not None and tokens != wanted.tokens:
        return (
            f"its prompt has {tokens} tokens there and {wanted.tokens} here; both workers must use the same chat "
            "template and tokenizer"
        )
    covered = wanted.block_size * params.get("dcp_size", 1)
    if wanted.tokens is not None and covered and any(len(group) * covered < wanted.tokens for group in blocks):
        return "it has too few blocks for the prompt"
    return None


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_blocks(group: Any) -> bool:
    return isinstance(group, list | tuple) and all(_whole(block, 0) for block in group)
