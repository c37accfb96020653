"""After a reset of the tiers, blocks that a window has left are not stored under the names of what they once held.

Where layers see a window of tokens only, vLLM gives blocks behind it to other requests while theirs goes on. It notes
that for the blocks that are still to be stored, not for those that were. A reset makes it store what running requests
hold from the first block on, by the numbers it knows: the KV of other tokens would be found under these.
"""

from __future__ import annotations

from vllm_pd.vllm_compat import OffloadingConnectorScheduler


def leave_out_stored(scheduler: OffloadingConnectorScheduler) -> None:
    """Called before a reset: what was stored of windows is taken for skipped (block 0), as vLLM marks it elsewhere.

    Some of it may still be held, and is a miss from then on. A request that is preempted gets other blocks, and all of
    these are stored.
    """
    config = scheduler.config
    for status in scheduler._req_status.values():
        for group, state in zip(config.kv_group_configs, status.group_states, strict=True):
            if group.sliding_window_size_in_chunks is not None:
                stored = min(state.next_stored_chunk_idx * config.blocks_per_chunk, len(state.block_ids))
                state.block_ids[:stored] = [0] * stored
