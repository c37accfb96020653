"""What only the store in memory can do wrong: waiting for things that never happen costs no memory."""

from __future__ import annotations

from tests.conformance.block_index import POOL
from vllm_pd.state.base import Epoch, WorkerId
from vllm_pd.state.memory_block_index import MemoryBlockIndex
from vllm_pd.state.memory_prefill_queue import MemoryPrefillQueue
from vllm_pd.state.memory_store import MemoryStore
from vllm_pd.state.prefill_queue import Claimant


async def test_whoever_waited_in_vain_is_forgotten() -> None:
    store = MemoryStore()
    index, queue = MemoryBlockIndex("test", store), MemoryPrefillQueue("test", store)
    claimant = Claimant(WorkerId("a:1"), Epoch(1))
    tail = await index.tail(POOL)
    for _ in range(3):
        assert await index.read(POOL, tail, wait_ms=1) == []
        assert await queue.claim(POOL, claimant, fits=-1, wait_ms=1) is None
        assert await queue.results(POOL, "router", 1) == await queue.cancelled(POOL, claimant, 1) == []
    with store.lock:
        space = store.namespace("test")
        assert len(space.stream(POOL).waiters) == len(space.queue(POOL).waiters) == 0
