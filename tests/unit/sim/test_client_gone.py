"""A client leaves in one phase of its request or another: the engines hear of it at once, through the real router.

Mock engines that take very long for what a client waits for, in short steps: whatever ends sooner was aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest

from tests.unit.sim.conftest import StartHost, until
from vllm_pd.router.service import RouterService
from vllm_pd.router.settings import RouterSettings
from vllm_pd.sim.mock_faults import Faults
from vllm_pd.sim.mock_worker import MockWorker
from vllm_pd.sim.timing import TimingModel
from vllm_pd.sim.work import EngineConfig
from vllm_pd.state.base import Role

TEXT = "Whether I shall turn out to be the hero of my own life, or whether that station will be held by anybody else. "
SLOW_PREFILL = TimingModel(prefill_base=0.5)
SLOW_DECODE = TimingModel(decode_min=0.05)
SLOW_HANDOVER = TimingModel(transfer_base=2.0)
ENGINE = EngineConfig(gpu_blocks=512, block_size=16, max_num_batched_tokens=16)


@pytest.fixture
async def routers() -> AsyncIterator[list[RouterService]]:
    started: list[RouterService] = []
    yield started
    for service in started:
        await service.stop()


@pytest.mark.parametrize(
    ("phase", "prefill", "decode", "stream"),
    [
        ("prefilling", SLOW_PREFILL, TimingModel(), False),
        ("transferring", TimingModel(), SLOW_HANDOVER, True),
        ("decoding", TimingModel(), SLOW_DECODE, False),
        ("decoding", TimingModel(), SLOW_DECODE, True),
    ],
)
@pytest.mark.parametrize("way", ["queue", "direct"])
async def test_both_engines_let_go_at_once(
    start_workers: StartHost,
    routers: list[RouterService],
    store_url: str,
    phase: str,
    prefill: TimingModel,
    decode: TimingModel,
    stream: bool,
    way: str,
) -> None:
    namespace = f"gone-{phase}-{stream}-{way}"
    common = {"store": store_url, "namespace": namespace, "engine": ENGINE, "speed": 1.0}
    (prefiller,) = await start_workers((Role.PREFILL,), timing=prefill, **common)
    (decoder,) = await start_workers((Role.DECODE,), timing=decode, **common)
    values = replace(
        RouterSettings(),
        port=0,
        store=store_url,
        namespace=namespace,
        shutdown_grace=1.0,
        disagg="always",
        prefill_dispatch=way,
    )
    service = RouterService(values, refresh_s=0.05)
    routers.append(service)
    await service.start()
    await until(lambda: len(service.directory.workers) == 2, "the router knows both workers")
    workers = [prefiller, decoder]
    busy = prefiller if phase == "prefilling" else decoder
    async with aiohttp.ClientSession() as session:
        body = {"model": "mock", "prompt": TEXT * 8, "max_tokens": 2000, "stream": stream}
        asking = asyncio.create_task(session.post(f"http://127.0.0.1:{service.port}/v1/completions", json=body))
        await until(lambda: busy.counters.requests == 1, f"it is {phase}")
        asking.cancel()
        await until(lambda: busy.counters.aborted == 1, "the engine heard of it")
    await all_is_free(service, workers)


async def all_is_free(service: RouterService, workers: list[MockWorker]) -> None:
    await until(lambda: all(worker.live.engine.pool.used == 0 for worker in workers), "all blocks are free")
    await until(lambda: all(worker.inflight == 0 for worker in service.directory.workers), "nothing is in flight")


@pytest.mark.parametrize("stream", [False, True])
async def test_blocks_do_not_wait_for_a_request_that_never_came_to_its_engine(
    start_workers: StartHost, routers: list[RouterService], store_url: str, stream: bool
) -> None:
    """The client leaves while the decode worker's API server has the request and its engine does not."""
    common = {"store": store_url, "namespace": f"never-came-{stream}", "engine": ENGINE, "speed": 1.0}
    prefiller, decoder = await start_workers((Role.PREFILL, Role.DECODE), **common)
    decoder.faults = Faults(delay=600.0, times=1)
    values = replace(RouterSettings(), port=0, store=store_url, namespace=f"never-came-{stream}", disagg="always")
    service = RouterService(values, refresh_s=0.05)
    routers.append(service)
    await service.start()
    await until(lambda: len(service.directory.workers) == 2, "the router knows both workers")
    async with aiohttp.ClientSession() as session:
        body = {"model": "mock", "prompt": TEXT * 8, "max_tokens": 20, "stream": stream}
        asking = asyncio.create_task(session.post(f"http://127.0.0.1:{service.port}/v1/completions", json=body))
        await until(lambda: not decoder.faults.delay, "its API server has it")
        assert prefiller.live.engine.pool.used > 0
        asking.cancel()
    await all_is_free(service, [prefiller, decoder])
    assert decoder.counters.requests == 1, "no more than a word about it"
