"""One `vllm serve` with two API server processes is one worker: registered once, withdrawn when it is told to end."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import prompts
from tests.e2e.ask import Endpoint, Prompt
from tests.e2e.conftest import MODEL, tiny_cluster
from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.graph.local import LocalCluster
from vllm_pd.state import Holder, RegistrySnapshot, Role, WorkerRecord, open_block_index, open_registry

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SOON_S = 60.0


def registered(cluster: LocalCluster) -> RegistrySnapshot:
    async def read() -> RegistrySnapshot:
        registry = open_registry(cluster.store_url, cluster.namespace, timeout_s=5.0)
        try:
            return await registry.snapshot()
        finally:
            await registry.close()

    return asyncio.run(read())


def indexed(cluster: LocalCluster, record: WorkerRecord) -> int:
    """How many blocks of the worker the index has."""

    async def read() -> int:
        index = open_block_index(cluster.store_url, cluster.namespace, timeout_s=5.0)
        try:
            held = await index.held(record.pool.id, Holder(record.id, 0), record.epoch)
        finally:
            await index.close()
        return 0 if held is None else sum(map(len, held.blocks.values())) // KEY_BYTES

    return asyncio.run(read())


def test_two_api_servers_are_one_worker_and_withdraw_at_the_start_of_shutdown(tiny_model: Path, tmp_path: Path) -> None:
    cluster = tiny_cluster(tiny_model, tmp_path, args=("--api-server-count", "2"), both=1)
    with cluster:
        (state,) = registered(cluster).workers
        (worker,) = cluster.workers
        assert (state.record.url, state.record.role, state.record.models) == (worker.url, Role.BOTH, (MODEL,))
        assert state.record.can_transfer and state.record.kv_blocks > 0 and state.record.tokenizer

        router = Endpoint(cluster.router_url, MODEL)
        questions = [Prompt(str(n), "completion", {"prompt": f"{n} {prompts.TEXTS['english']}"}) for n in range(16)]
        with ThreadPoolExecutor(8) as pool:
            assert all(len(answer.steps) == 12 for answer in pool.map(router.ask, questions))
        assert registered(cluster).workers[0].loads, "whichever process heard of a step, its load is published"
        deadline = time.monotonic() + SOON_S
        while indexed(cluster, state.record) < len(questions):
            assert time.monotonic() < deadline, "one of the processes writes the index, whichever was asked"
            time.sleep(0.1)

        worker.process.terminate()
        deadline = time.monotonic() + SOON_S
        while registered(cluster).workers:
            assert time.monotonic() < deadline, "the worker ends and is still on the list"
            time.sleep(0.1)
    assert not cluster.left.processes and not cluster.left.ports
