"""Stores for the conformance suites: each server starts once and is emptied for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.conformance.deployments import Deployment
from tests.conformance.servers import SERVERS, STORES, MemoryHarness, RedisHarness


@pytest.fixture(scope="package")
def server() -> Iterator[Callable[[str], Deployment]]:
    """A server by its name in `SERVERS`."""
    running: dict[str, Deployment] = {}
    with ExitStack() as stack:

        def get(name: str) -> Deployment:
            if name not in running:
                running[name] = stack.enter_context(SERVERS[name]())
            return running[name]

        yield get


@pytest.fixture(params=STORES)
async def harness(
    request: pytest.FixtureRequest, server: Callable[[str], Deployment]
) -> AsyncIterator[MemoryHarness | RedisHarness]:
    name: str = request.param
    found = MemoryHarness() if name == "memory" else RedisHarness(server(name))
    await found.lose_everything()
    yield found
    await found.close()
