"""What the agent does beside changing its role."""

from __future__ import annotations

import asyncio

from tests.conformance.registry import POOL, worker
from vllm_pd.agent.agent import Agent
from vllm_pd.agent.spec import AgentSpec
from vllm_pd.background import end_tasks
from vllm_pd.errors import StoreError
from vllm_pd.state import MemoryBlockIndex, MemoryRegistry, MemoryRoles, MemoryStore, Role, WantedRole

RECORD = worker("a:1", role=Role.DECODE)
DEADLINE_S = 60.0


class Unreadable(MemoryRoles):
    """Wishes that cannot be read."""

    async def of(self, *args: object) -> WantedRole | None:
        raise StoreError("Another program uses the key; delete it.")


async def _serves() -> bool:
    return True


async def test_wishes_that_cannot_be_read_keep_no_load_from_being_told() -> None:
    store = MemoryStore()
    registry = MemoryRegistry("n", store)
    agent = Agent(
        AgentSpec(store="memory://x", record=RECORD),
        lambda: MemoryRegistry("n", store),
        lambda: MemoryBlockIndex("n", store),
        _serves,
        lambda: Unreadable("n", store),
    )
    agent.observe(0, 3, 1, 0.5)
    task = asyncio.create_task(agent.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while (state := await registry.find(RECORD.id, POOL.id)) is None or not state.loads:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (state.running, state.waiting) == (3, 1)
    finally:
        await end_tasks((task,))
