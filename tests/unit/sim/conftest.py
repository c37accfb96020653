"""Mock workers in this process, each on a real socket."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import aiohttp
import pytest

from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.sim.mock_host import MockHost
from vllm_pd.sim.mock_tokenizer import MockTokenizer
from vllm_pd.sim.mock_worker import MockConfig, MockWorker
from vllm_pd.sim.work import EngineConfig
from vllm_pd.state.base import Role

WAIT_S = 20.0
CONFIG = MockConfig(engine=EngineConfig(gpu_blocks=512, block_size=16), speed=50.0)


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for `condition`, at most `WAIT_S`."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


@dataclasses.dataclass
class Client:
    """Asks workers, or whatever is at a URL."""

    session: aiohttp.ClientSession

    async def post(self, url: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.session.post(url, json=body, headers=headers) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def get(self, url: str) -> tuple[int, str]:
        async with self.session.get(url) as reply:
            return reply.status, await reply.text()

    async def chunks(self, url: str, body: Any) -> list[Any]:
        """The events of a stream, without the last, which must be [DONE]."""
        async with self.session.post(url, json={**body, "stream": True}) as reply:
            assert reply.status == 200, await reply.text()
            events = [line[6:] for line in (await reply.text()).splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]


StartHost = Callable[..., Awaitable[list[MockWorker]]]


@pytest.fixture(scope="session")
def tokenizer() -> MockTokenizer:
    return MockTokenizer()


@pytest.fixture(scope="module")
def store_url() -> Iterator[str]:
    with EmbeddedStore() as store:
        yield store.url


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:
        yield Client(session)


@pytest.fixture
async def start_workers(tokenizer: MockTokenizer) -> AsyncIterator[StartHost]:
    """Starts workers with the given roles; keywords change `CONFIG`."""
    hosts: list[MockHost] = []

    async def start(roles: Sequence[Role] = (Role.BOTH,), **changes: Any) -> list[MockWorker]:
        host = MockHost(dataclasses.replace(CONFIG, **changes), roles, tokenizer)
        hosts.append(host)
        await host.start()
        return host.workers

    yield start
    for host in hosts:
        await host.stop()
