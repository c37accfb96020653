"""Prefill jobs in a real store are done by a real worker, which has an API key; there is no router here.

A job that is to be caught while the engine has it is put when the engine is stopped (SIGSTOP); its API server runs on.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import prompts
from tests.e2e.conftest import MODEL, WORKER_IN_ENGINE, tiny_cluster
from tests.e2e.test_released_blocks import eventually, stopped
from tests.e2e.test_worker_loss import PREFILL_LEG
from vllm_pd.graph.local import LocalCluster, LocalWorker
from vllm_pd.holds import HOLD_FIELD
from vllm_pd.state import WorkerRecord
from vllm_pd.state.prefill_payload import PrefillAnswer, PrefillRequest, decode_answer, encode_request
from vllm_pd.state.prefill_queue import JobId, JobInfo, JobResult, PrefillJob
from vllm_pd.state.redis_prefill_queue import RedisPrefillQueue
from vllm_pd.state.redis_registry import RedisRegistry

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SOON_S = 60.0
KEY = "only-the-server-and-its-agent-know-it"
ROUTER = "router-1"


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    made = tiny_cluster(
        tiny_model, tmp_path_factory.mktemp("jobs"), env={"VLLM_API_KEY": KEY, **WORKER_IN_ENGINE}, router=False,
        prefill=1,
    )  # fmt: skip
    with made:
        yield made
    assert not made.left, f"the cluster left behind: {made.left}"


@pytest.fixture
def worker(cluster: LocalCluster) -> LocalWorker:
    return cluster.worker("prefill-0")


class Router:
    """The router's side of the queue, each call in a loop of its own."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._url = cluster.store_url
        assert eventually(lambda: bool(self.registered()))
        self.record = self.registered()[0]
        self.results: dict[str, JobResult] = {}
        self._do(lambda queue: queue.announce_router(self.record.pool.id, ROUTER, 600_000))

    def registered(self) -> Sequence[WorkerRecord]:
        async def ask() -> Sequence[WorkerRecord]:
            registry = RedisRegistry(self._url, "default", timeout_s=10.0)
            try:
                return [state.record for state in (await registry.snapshot()).workers]
            finally:
                await registry.close()

        return asyncio.run(ask())

    def _do(self, call: Callable[[RedisPrefillQueue], Awaitable[Any]]) -> Any:
        async def ask() -> Any:
            queue = RedisPrefillQueue(self._url, "default", timeout_s=10.0)
            try:
                return await call(queue)
            finally:
                await queue.close()

        return asyncio.run(ask())

    def put(self, name: str, prompt: str, hold: str = "") -> None:
        params = {**PREFILL_LEG, **({HOLD_FIELD: hold} if hold else {})}
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": False,
            "kv_transfer_params": params,
        }  # fmt: skip
        request = PrefillRequest(
            path="/v1/completions",
            headers=[("X-Request-Id", f"{name}-prefill")],
            body=json.dumps(body).encode(),
            deadline_ms=time.time_ns() // 1_000_000 + 120_000,
            timeout_ms=120_000,
        )
        job = PrefillJob(JobId(name), 300, encode_request(request), None, 0, ROUTER)
        assert self._do(lambda queue: queue.put(self.record.pool.id, job, 120_000))

    def cancel(self, name: str) -> bool:
        cancelled: bool = self._do(lambda queue: queue.cancel(self.record.pool.id, JobId(name)))
        return cancelled

    def jobs(self) -> Sequence[JobInfo]:
        jobs: Sequence[JobInfo] = self._do(lambda queue: queue.jobs(self.record.pool.id))
        return jobs

    def claimed(self, name: str) -> bool:
        return any(job.id == name and job.claimant for job in self.jobs())

    def listen(self) -> None:
        self.results |= dict(self._do(lambda queue: queue.results(self.record.pool.id, ROUTER, 200)))

    def answer(self, name: str) -> PrefillAnswer:
        def arrived() -> bool:
            self.listen()
            return name in self.results

        assert eventually(arrived), f"{name} has no result"
        assert not self.results[name].error
        return decode_answer(self.results[name].data)


@pytest.fixture(scope="module")
def router(cluster: LocalCluster) -> Router:
    return Router(cluster)


def question(name: str) -> str:
    return f"{name}: {prompts.TEXTS['english'] * 6}"


def ended(worker: LocalWorker, how: str) -> float:
    return worker.metrics().value("vllm_pd_agent_prefill_ended_total", how=how)


def running(worker: LocalWorker) -> float:
    metrics = worker.metrics()
    return metrics.value("vllm:num_requests_running") + metrics.value("vllm:num_requests_waiting")


def test_a_job_is_done_by_the_worker_with_its_own_key(router: Router, worker: LocalWorker) -> None:
    assert router.record.claims and router.record.asks_key
    router.put("plain", question("plain"))
    answer = router.answer("plain")
    assert answer.status == 200, answer.body
    params = json.loads(answer.body)["kv_transfer_params"]
    assert params["remote_engine_id"] and any(params["remote_block_ids"])
    assert params["remote_host"] == router.record.nixl_host
    assert router.results["plain"].worker == router.record.id
    assert eventually(lambda: ended(worker, "done") >= 1)
    # Nobody reads the blocks of this one; the lease is long.
    router.put("refused", question("refused") * 30)
    refused = router.answer("refused")
    assert refused.status == 400 and b"maximum context length" in refused.body


def test_a_job_that_is_cancelled_leaves_no_block_behind(router: Router, worker: LocalWorker) -> None:
    assert eventually(lambda: running(worker) == 0)
    before = worker.metrics().value("vllm:kv_cache_usage_perc")
    with stopped(worker):
        router.put("cancelled", question("cancelled"), hold="a-key-that-nobody-guesses")
        assert eventually(lambda: router.claimed("cancelled"))
        assert router.cancel("cancelled")
        assert eventually(lambda: ended(worker, "lost") >= 1)
    assert eventually(lambda: running(worker) == 0)
    assert eventually(lambda: worker.metrics().value("vllm:kv_cache_usage_perc") <= before)
    router.put("after", question("after"))
    assert router.answer("after").status == 200


def test_an_engine_that_stands_still_loses_its_job_and_takes_the_next_when_it_runs_again(
    router: Router, worker: LocalWorker
) -> None:
    with stopped(worker):
        router.put("stuck", question("stuck"))
        assert eventually(lambda: router.claimed("stuck"))
        # Its API server lives, and claims nothing for an engine that does not get on.
        assert eventually(lambda: ended(worker, "failed") >= 1)
        (job,) = router.jobs()
        assert (job.id, job.claimant, job.attempt) == ("stuck", "", 1)
    assert router.answer("stuck").status == 200


def test_a_worker_that_is_stopped_ends_what_it_has_and_leaves_the_rest(router: Router, worker: LocalWorker) -> None:
    """Last: the worker is gone after it."""
    names = [f"drain-{i}" for i in range(12)]
    with stopped(worker):
        for name in names:
            router.put(name, question(name))
        assert eventually(lambda: router.claimed(names[0]))
        claimed = {job.id for job in router.jobs() if job.claimant}
        worker.process.terminate()
        assert eventually(lambda: not router.registered())
    assert eventually(lambda: not worker.process.is_running, seconds=2 * SOON_S)
    router.listen()
    waiting = {job.id: job for job in router.jobs()}
    done = {name for name in names if name in router.results}
    assert all(not router.results[name].error for name in done)
    # Given back by an engine that stood still for too long, which on a slow machine it may have, or not begun.
    assert all(waiting[name].attempt <= 1 for name in claimed - done)
    assert all(decode_answer(router.results[name].data).status == 200 for name in done)
    # What it had not begun waits for others, as if it had never been claimed.
    assert done | set(waiting) == set(names)
    assert all(job.claimant == "" and (job.attempt == 0 or job.id in claimed) for job in waiting.values())
