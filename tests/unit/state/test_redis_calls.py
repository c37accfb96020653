"""The deadline of a call, whatever happens inside it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from vllm_pd.errors import StoreError
from vllm_pd.state.redis_calls import RedisCalls

PATIENCE_S = 30.0


@pytest.fixture
def calls() -> RedisCalls:
    return RedisCalls("redis://127.0.0.1:1", timeout_s=0.05, longest_s=3600.0)


async def test_a_call_that_loses_its_cancellation_ends_all_the_same(calls: RedisCalls) -> None:
    lost = False
    with pytest.raises(StoreError, match=r"did not answer within 0\.05 s"):
        async with asyncio.timeout(PATIENCE_S), calls.answer():
            # As `asyncio.wait_for` of Python 3.11 does when what it waits for is done at the same moment.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            lost = True
            await asyncio.Event().wait()
    assert lost
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_a_call_that_is_cancelled_from_outside_is_no_failure_of_the_store(calls: RedisCalls) -> None:
    async def call() -> None:
        async with calls.answer(PATIENCE_S):
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
