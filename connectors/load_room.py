"""How many blocks requests still need whose KV is loaded, or is being loaded. Runs in the engine's process.

A request holds its blocks from the beginning of the load on, runs only once it has those for the rest of its prompt,
too, and gives none back until then. So vLLM begins another load only where that leaves free what all of these still
need: with less they wait for each other for ever, and nothing runs that could give way. Of layers that see a window of
tokens vLLM counts the blocks that the window has left as if they were still held, and keeps too little free.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_pd.vllm_compat import Scheduler, SingleTypeKVCacheManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

_MARK = "_vllm_pd_counts_windows"


def install() -> None:
    """Wrap what the scheduler counts, in this process. Idempotent."""
    counted = Scheduler._request_remaining_blocks
    if getattr(counted, _MARK, False):
        return

    @functools.wraps(counted)
    def remaining_blocks(self: Any, request: Request) -> int:
        tokens = request.num_tokens
        if self.num_spec_tokens:
            tokens += 1 + self.num_spec_tokens + self.num_lookahead_tokens
        managers: Sequence[SingleTypeKVCacheManager] = self.kv_cache_manager.coordinator.single_type_managers
        return int(counted(self, request)) + sum(_left_out(manager, request.request_id, tokens) for manager in managers)

    setattr(remaining_blocks, _MARK, True)
    Scheduler._request_remaining_blocks = remaining_blocks


def _left_out(manager: SingleTypeKVCacheManager, request_id: str, tokens: int) -> int:
    """What vLLM's number lacks of one group's blocks, for a request of so many tokens."""
    most: int | None = manager.max_admission_blocks_per_request
    table: Sequence[KVCacheBlock] = manager.req_to_blocks.get(request_id, ())
    if most is None or not table:
        return 0
    whole = -(-tokens // int(manager.block_size))
    # Blocks that the window has left are the first ones, and a shared null block by now.
    held = sum(1 for _ in itertools.takewhile(lambda block: not block.is_null, reversed(table)))
    return max(0, min(whole - len(table), most - held)) - max(0, min(whole, most) - len(table))
