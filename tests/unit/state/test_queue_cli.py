"""`vllm-pd queue` on a real server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.conformance.prefill_queue import ROUTER, TTL_MS, A, at
from tests.conformance.registry import LEASE_MS, POOL, worker
from vllm_pd.cli import main
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state import JobId, PrefillJob, QueueLimits
from vllm_pd.state.prefill_payload import PrefillRequest, encode_request
from vllm_pd.state.redis_prefill_queue import RedisPrefillQueue
from vllm_pd.state.redis_registry import RedisRegistry

REQUEST = PrefillRequest(
    path="/v1/completions",
    headers=[("x-session-id", "of somebody")],
    body=b'{"prompt":"a secret of somebody"}',
    # Of whenever this module was imported; the tests may run much later.
    deadline_ms=round(time.time() * 1000) + 3_600_000,
    timeout_ms=60_000,
)
PAYLOAD = encode_request(REQUEST)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        monkeypatch.setenv("VLLM_PD_STORE", store.url)
        yield store


def with_queue(store: EmbeddedStore, act: Callable[[RedisPrefillQueue], Awaitable[None]]) -> None:
    """Do something to the queue, in whose pool one worker lives."""

    async def run() -> None:
        registry = RedisRegistry(store.url, "default", timeout_s=10.0)
        limits = QueueLimits(attempts=1)
        queue = RedisPrefillQueue(store.url, "default", limits=limits, timeout_s=10.0)
        await registry.heartbeat(worker(A), LEASE_MS)
        await act(queue)
        await registry.close()
        await queue.close()

    asyncio.run(run())


async def three_jobs(queue: RedisPrefillQueue) -> None:
    """One waits, one is claimed, one is dead."""
    for name in ("bad", "own"):
        await queue.put(POOL.id, PrefillJob(JobId(name), 7, b"?", A, router=ROUTER), TTL_MS)
    await queue.put(POOL.id, PrefillJob(JobId("waits"), 100, PAYLOAD, order=5, router=ROUTER), TTL_MS)
    bad = await queue.claim(POOL.id, at(A, worker().epoch), fits=-1)
    assert bad is not None
    assert await queue.fail(POOL.id, bad, "out of memory")
    assert await queue.claim(POOL.id, at(A, worker().epoch), fits=-1) is not None


def test_ls_shows_streams_and_jobs(store: EmbeddedStore, capsys: pytest.CaptureFixture[str]) -> None:
    with_queue(store, three_jobs)
    assert main(["queue", "ls", "--json"]) == 0
    (pool,) = json.loads(capsys.readouterr().out)
    assert (pool["pool"], pool["model"]) == (POOL.id, "tiny")
    assert pool["streams"] == [
        {"worker": None, "waiting": 1, "waiting_tokens": 100, "claimed": 0, "claimed_tokens": 0},
        {"worker": A, "waiting": 0, "waiting_tokens": 0, "claimed": 1, "claimed_tokens": 7},
    ]
    waits, own = pool["jobs"]
    assert {name: waits[name] for name in ("job", "worker", "tokens", "order", "router", "attempt", "claimant")} == {
        "job": "waits",
        "worker": None,
        "tokens": 100,
        "order": 5,
        "router": ROUTER,
        "attempt": 0,
        "claimant": "",
    }
    assert (own["job"], own["claimant"]) == ("own", f"{A}@{worker().epoch}")
    assert main(["queue", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["(shared)", "1", "100", "0", "0"]
    assert lines[-1].split()[:3] == ["own", A, "7"]
    assert main(["queue", "ls", "--limit", "1", "--json"]) == 0
    assert [job["job"] for job in json.loads(capsys.readouterr().out)[0]["jobs"]] == ["waits"]


def test_peek_shows_what_users_wrote_only_when_asked(store: EmbeddedStore, capsys: pytest.CaptureFixture[str]) -> None:
    with_queue(store, three_jobs)
    assert main(["queue", "peek", "waits"]) == 0
    shown = capsys.readouterr().out
    assert main(["queue", "peek", "waits", "--json"]) == 0
    job = json.loads(capsys.readouterr().out)
    assert "somebody" not in shown + json.dumps(job)
    assert (job["job"], job["path"], job["body_bytes"]) == ("waits", "/v1/completions", len(REQUEST.body))
    assert job["header_names"] == ["x-session-id"]
    assert 0 < job["deadline_in_ms"] <= 3_600_000
    assert main(["queue", "peek", "waits", "--show-prompt"]) == 0
    shown = capsys.readouterr().out
    assert "a secret of somebody" in shown
    assert "of somebody" in shown
    assert main(["queue", "peek", "own"]) == 0
    assert "another version made it" in capsys.readouterr().out


def test_cancel_takes_a_job_out(store: EmbeddedStore, capsys: pytest.CaptureFixture[str]) -> None:
    with_queue(store, three_jobs)
    assert main(["queue", "cancel", "waits"]) == 0
    assert capsys.readouterr().out == "Cancelled waits.\n"
    assert main(["queue", "cancel", "own"]) == 0
    assert f"{A}@{worker().epoch} had it and is told to stop" in capsys.readouterr().out
    for action in ("cancel", "peek"):
        assert main(["queue", action, "waits"]) == 1
        assert "No job 'waits' is in the queue" in capsys.readouterr().err
    assert main(["queue", "cancel", "never", "--json"]) == 1

    async def is_still_possible(queue: RedisPrefillQueue) -> None:
        assert await queue.cancelled(POOL.id, at(A, worker().epoch)) == ["own"]
        assert await queue.put(POOL.id, PrefillJob(JobId("never"), 1, b""), TTL_MS)
        errors = {name: result.error for name, result in await queue.results(POOL.id, ROUTER)}
        assert errors["waits"] == errors["own"] == "cancelled with vllm-pd queue cancel"

    with_queue(store, is_still_possible)


def test_dead_says_why(store: EmbeddedStore, capsys: pytest.CaptureFixture[str]) -> None:
    with_queue(store, three_jobs)
    assert main(["queue", "dead", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"pool": POOL.id, "id": "bad", "tokens": 7, "attempts": 1, "error": "out of memory"}
    ]
    assert main(["queue", "dead"]) == 0
    assert "out of memory" in capsys.readouterr().out


def test_what_cannot_be_done_is_said(store: EmbeddedStore, capsys: pytest.CaptureFixture[str]) -> None:
    for action in (["ls"], ["dead"]):
        assert main(["queue", *action]) == 1
        assert "No worker is registered" in capsys.readouterr().err
    assert main(["queue", "ls", "--pool", "0" * 16]) == 0
    assert main(["queue", "ls", "--namespace", "a:b"]) == 2
    for wrong in (["ls", "--limit", "0"], ["ls", "--pool", "x"], ["peek"], []):
        with pytest.raises(SystemExit, match="2"):
            main(["queue", *wrong])
    store.kill()
    assert main(["queue", "ls"]) == 1
    assert "cannot be used" in capsys.readouterr().err
