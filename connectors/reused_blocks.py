"""What vLLM's offloading connector is not told of blocks that other requests get while theirs are being stored.

It stores a block by its number, some time after the step that filled it, and ends such a copy before somebody else
writes to the block. Two cases escape it, and the KV of other tokens would be found under the block's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd.vllm_compat import OffloadingConnectorScheduler

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks


def read_into(scheduler: OffloadingConnectorScheduler, blocks: KVCacheBlocks) -> None:
    """A hand-off is about to be read into these blocks.

    vLLM learns of new blocks from the step that computes with them, which is after the read: see vLLM's issue 46951.
    """
    numbers = {block.block_id for group in blocks.blocks for block in group if block.block_id}
    scheduler._current_batch_allocated_block_ids |= numbers


def before_reset(scheduler: OffloadingConnectorScheduler) -> None:
    """The tiers are about to be emptied; what running requests hold is stored again then, from the first block on.

    Where layers see a window of tokens only, blocks behind it are given away while the request goes on. vLLM notes
    that for blocks that are still to be stored, not for those that were. These are taken for skipped (block 0), as vLLM
    marks the others. Some may still be held, and are misses from then on; a request that is preempted gets other
    blocks, all of which are stored.
    """
    config = scheduler.config
    for status in scheduler._req_status.values():
        for group, state in zip(config.kv_group_configs, status.group_states, strict=True):
            if group.sliding_window_size_in_chunks is not None:
                stored = min(state.next_stored_chunk_idx * config.blocks_per_chunk, len(state.block_ids))
                state.block_ids[:stored] = [0] * stored
