"""The deadline of a call, whatever happens inside it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import uvloop

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


def test_a_connection_that_was_reset_just_before_the_call_is_a_failure_of_the_store(calls: RedisCalls) -> None:
    async def call() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.transport.abort()
        await asyncio.sleep(0)
        async with server, calls.answer(PATIENCE_S):
            writer.transport.writelines([b"PING"])

    with pytest.raises(StoreError, match="cannot be used"):
        uvloop.run(call())


async def test_an_error_of_the_program_is_no_failure_of_the_store(calls: RedisCalls) -> None:
    with pytest.raises(RuntimeError, match="mistake"):
        async with calls.answer(PATIENCE_S):
            raise RuntimeError("mistake")
