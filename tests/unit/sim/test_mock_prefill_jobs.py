"""Mock workers take prefill jobs from the store's queue as real ones do: with the same runner."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator

import pytest

from tests.unit.sim.conftest import WAIT_S, Client, StartHost, until
from vllm_pd.sim.mock_worker import MockWorker
from vllm_pd.state import open_prefill_queue, open_registry
from vllm_pd.state.base import Role, WorkerRecord
from vllm_pd.state.prefill_payload import PrefillAnswer, PrefillRequest, decode_answer, encode_request
from vllm_pd.state.prefill_queue import JobId, PrefillJob, PrefillQueue

ROUTER = "r"
LEASE_S = 3.0


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def queue(store_url: str, namespace: str) -> AsyncIterator[PrefillQueue]:
    queue = open_prefill_queue(store_url, namespace, timeout_s=10.0)
    yield queue
    await queue.close()


async def registered(store_url: str, namespace: str, count: int) -> list[WorkerRecord]:
    registry = open_registry(store_url, namespace, timeout_s=10.0)
    try:
        async with asyncio.timeout(WAIT_S):
            while len(states := (await registry.snapshot()).workers) < count:  # noqa: ASYNC110 - the store has no event
                await asyncio.sleep(0.05)
        return [state.record for state in states]
    finally:
        await registry.close()


async def put(queue: PrefillQueue, record: WorkerRecord, name: str, tokens: int = 64) -> None:
    await queue.announce_router(record.pool.id, ROUTER, 600_000)
    body = {"model": "mock", "prompt": [7] * tokens, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    request = PrefillRequest(
        path="/v1/completions",
        headers=[],
        body=json.dumps(body).encode(),
        deadline_ms=time.time_ns() // 1_000_000 + 60_000,
        timeout_ms=60_000,
    )
    job = PrefillJob(JobId(name), tokens, encode_request(request), None, 0, ROUTER)
    assert await queue.put(record.pool.id, job, 60_000)


async def answer(queue: PrefillQueue, record: WorkerRecord) -> PrefillAnswer:
    async with asyncio.timeout(WAIT_S):
        while not (found := await queue.results(record.pool.id, ROUTER, 500)):
            pass
    ((_, result),) = found
    assert (result.error, result.worker) == ("", record.id)
    return decode_answer(result.data)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.BOTH])
async def test_a_job_is_done_and_its_blocks_are_held(
    role: Role, start_workers: StartHost, client: Client, store_url: str, queue: PrefillQueue,
    namespace: str,
) -> None:  # fmt: skip
    (worker,) = await start_workers([role], store=store_url, namespace=namespace, lease_s=LEASE_S)
    (record,) = await registered(store_url, namespace, 1)
    assert record.claims
    await put(queue, record, "one")
    done = await answer(queue, record)
    assert done.status == 200
    params = json.loads(done.body)["kv_transfer_params"]
    assert params["remote_request_id"] in worker.holds
    await until(lambda: worker.prefill_stats and worker.prefill_stats.tokens == 0, "the job's end is counted")
    ended = 'vllm_pd_agent_prefill_ended_total{engine="0",model_name="mock",how="done"} 1'
    deadline = time.monotonic() + WAIT_S
    # The agent shows its metrics once a second.
    while ended not in (page := (await client.get(f"{worker.url}/metrics"))[1]):
        assert time.monotonic() < deadline, page
        await asyncio.sleep(0.1)
    assert 'vllm_pd_agent_prefill_claimed_total{engine="0",model_name="mock",stolen="false"} 1' in page


@pytest.mark.parametrize(("role", "claims"), [(Role.DECODE, True), (Role.PREFILL, False)])
async def test_one_that_does_not_prefill_or_is_told_so_claims_nothing(
    role: Role, claims: bool, start_workers: StartHost, store_url: str, queue: PrefillQueue,
    namespace: str,
) -> None:  # fmt: skip
    (worker,) = await start_workers([role], store=store_url, namespace=namespace, lease_s=LEASE_S, claims=claims)
    (record,) = await registered(store_url, namespace, 1)
    assert record.claims is claims
    await put(queue, record, "one")
    assert worker.prefill_stats is None or worker.prefill_stats.claimed == 0
    assert (await queue.depth(record.pool.id, []))[None].waiting == 1


async def test_what_a_dead_one_had_is_missed_and_a_stopped_one_gives_it_back(
    start_workers: StartHost, store_url: str, queue: PrefillQueue, namespace: str
) -> None:
    workers: list[MockWorker] = await start_workers(
        [Role.PREFILL] * 2,
        store=store_url,
        namespace=namespace,
        lease_s=LEASE_S,
        speed=0.001,
        grace_s=0.0,
        prefill_budget_tokens=100,
    )
    records = await registered(store_url, namespace, 2)
    pool = records[0].pool.id
    # At this speed nothing is ever done, and the budget allows each one of them.
    for name in ("one", "two"):
        await put(queue, records[0], name, 2000)
    async with asyncio.timeout(WAIT_S):
        while sum(bool(job.claimant) for job in await queue.jobs(pool)) < 2:  # noqa: ASYNC110 - nor has the queue
            await asyncio.sleep(0.05)
    dead, stopped = workers
    dead.die()
    await stopped.withdraw()
    claimants = {job.claimant.partition("@")[0] for job in await queue.jobs(pool)}
    assert claimants == {"", dead.url.rpartition("//")[2]}
