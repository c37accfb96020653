"""`vllm-pd planner explain` and `status` on a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.conformance.registry import LEASE_MS, POOL, worker
from vllm_pd.cli import main
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.planner.journal import Step, encode_step
from vllm_pd.state.open_registry import open_planner_board, open_registry


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        monkeypatch.setenv("VLLM_PD_STORE", store.url)
        yield store


def planned(store: EmbeddedStore) -> None:
    """One step, and no worker."""

    async def run() -> None:
        board = open_planner_board(store.url, "default", timeout_s=10.0)
        term = (await board.lead(POOL.id, "one", 60_000)).term
        step = encode_step(Step(POOL.id, 1_764_000_000.0, "one", term, "changes", "One worker is taken away."))
        assert await board.write(POOL.id, term, memory=b"", newest=step, journal=[step])
        await board.close()

    asyncio.run(run())


def registered(store: EmbeddedStore) -> None:
    async def run() -> None:
        registry = open_registry(store.url, "default", timeout_s=10.0)
        await registry.heartbeat(worker("a:1"), LEASE_MS)
        await registry.close()

    asyncio.run(run())


def test_what_was_decided_is_explained_when_the_last_worker_is_gone(
    store: EmbeddedStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["planner", "explain"]) == 1
    assert "No worker is registered" in capsys.readouterr().err
    planned(store)
    assert main(["planner", "explain"]) == 0
    shown = capsys.readouterr().out
    assert "One worker is taken away." in shown
    assert f"No worker of pool {POOL.id} is registered now" in shown
    assert main(["planner", "explain", "--json"]) == 0
    assert [step["verdict"] for step in json.loads(capsys.readouterr().out)] == ["One worker is taken away."]
    assert main(["planner", "status"]) == 0
    assert "(no worker)" in capsys.readouterr().out
    registered(store)
    assert main(["planner", "explain"]) == 0
    assert "is registered now" not in capsys.readouterr().out
