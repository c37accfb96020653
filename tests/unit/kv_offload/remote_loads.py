"""A connector beside the tiers that brings the KV of a whole prompt from elsewhere, as NIXL does in a hand-off.

It writes to the blocks as soon as the step that allocated them reaches the workers, and says so one step later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

NAME = "remote"
"""Requests whose names begin with it are brought."""


@dataclass
class Reads(KVConnectorMetadata):  # type: ignore[misc]
    """By request: its tokens and the blocks of each group."""

    wanted: dict[str, tuple[list[int], list[list[int]]]]


class RemoteLoads(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    write: Callable[[list[int], list[list[int]]], None]
    """Of the worker half: puts the KV of these tokens into these blocks."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._reads, self._asked, self._over = Reads({}), set[str](), set[str]()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not request.request_id.startswith(NAME) or request.request_id in self._asked:
            return 0, False
        return request.num_prompt_tokens - 1 - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._asked.add(request.request_id)
            numbers = [[block.block_id for block in group] for group in blocks.blocks]
            self._reads.wanted[request.request_id] = list(request.prompt_token_ids[:-1]), numbers

    def build_connector_meta(self, scheduler_output: Any) -> Reads:
        reads, self._reads = self._reads, Reads({})
        return reads

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, (tokens, blocks) in self._get_connector_metadata().wanted.items():
            self.write(tokens, blocks)
            self._over.add(name)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        over, self._over = self._over, set()
        return KVConnectorTransferResults(finished_recving=over)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
