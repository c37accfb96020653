"""What a worker prepares before its engine starts: a port for each data-parallel rank, and its line in the log."""

from __future__ import annotations

import argparse
import ssl
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_pd import settings, side_channel, worker_setup
from vllm_pd.side_channel import SideChannel
from vllm_pd.state.base import Role

pytestmark = pytest.mark.vllm

ENGINE = {
    "data_parallel_rank": None, "data_parallel_start_rank": None, "data_parallel_size_local": None,
    "data_parallel_size": 1,
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], int, int]]:
    """What was asked of `side_channel.ensure`: candidates, first rank, ranks."""
    asked: list[tuple[tuple[str, ...], int, int]] = []

    def ensure(candidates: Any, *, first_rank: int, ranks: int) -> SideChannel:
        asked.append((tuple(candidates), first_rank, ranks))
        return SideChannel("127.0.0.1", 20000)

    monkeypatch.setattr(side_channel, "ensure", ensure)
    return asked


@pytest.mark.parametrize(
    ("engine", "first", "ranks"),
    [
        ({}, 0, 1),
        ({"data_parallel_size": 4}, 0, 4),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, 0, 2),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 2}, 2, 2),
        ({"data_parallel_size": 4, "data_parallel_rank": 3}, 3, 1),
        ({"data_parallel_size": 4, "data_parallel_rank": 0, "data_parallel_size_local": 4}, 0, 1),
    ],
)
def test_a_port_is_reserved_for_each_rank_of_this_host(
    engine: dict[str, int], first: int, ranks: int, asked: list[tuple[tuple[str, ...], int, int]]
) -> None:
    worker_setup._side_channel(
        settings.WorkerSettings(advertise_url="http://10.0.0.7:8000"),
        argparse.Namespace(**{**ENGINE, **engine}),
        argparse.Namespace(host="10.0.0.8"),
    )
    ((candidates, first_rank, count),) = asked
    assert (first_rank, count) == (first, ranks)
    assert candidates[:2] == ("10.0.0.7", "10.0.0.8") and len(candidates) == 3


def test_the_log_line_names_role_store_and_tiers_without_a_secret() -> None:
    given = {"role": "prefill", "cpu_gib": 2, "ssd_path": "/d", "ssd_gib": 10}
    given["store"] = "redis://u:hunter2@h:1?password=hunter3"
    text = worker_setup.describe(settings.from_extra_config(given))
    assert "role prefill" in text and "2 GiB in host memory" in text and "10 GiB on /d" in text
    assert "hunter" not in text


def test_a_worker_without_store_or_tiers_says_so() -> None:
    text = worker_setup.describe(settings.WorkerSettings(role=Role.BOTH))
    assert "no store" in text and "no KV tier" in text


def test_what_the_agent_is_told_of_adapters_and_events() -> None:
    adapters = [argparse.Namespace(name="a", path="/adapters/a"), argparse.Namespace(name="b", path="org/b")]
    args = argparse.Namespace(model="m", port=8000, lora_modules=adapters)
    told = worker_setup._runtime_config(settings.WorkerSettings(), args, None, True)
    assert (told.loras, told.lora_paths) == (("a", "b"), ("/adapters/a", "org/b"))
    assert told.kv_events


@pytest.mark.parametrize(
    ("given", "environment", "key"),
    [
        (None, None, ""),
        (None, "from-environment", "from-environment"),
        (["first", "second"], "from-environment", "first"),
        ([""], "from-environment", ""),
    ],
)
def test_the_agent_knows_a_key_of_its_own_server_and_keeps_it_to_itself(
    given: list[str] | None, environment: str | None, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if environment is not None:
        monkeypatch.setenv("VLLM_API_KEY", environment)
    args = argparse.Namespace(model="m", port=8000, api_key=given)
    told = worker_setup._runtime_config(settings.WorkerSettings(prefill_budget_tokens=77), args, None, True)
    assert (told.api_key, told.prefill_budget_tokens, told.asks_certificate) == (key, 77, False)
    assert not key or key not in repr(told)


def test_the_agent_knows_that_its_server_wants_certificates() -> None:
    args = argparse.Namespace(model="m", port=8000, ssl_cert_reqs=int(ssl.CERT_REQUIRED))
    assert worker_setup._runtime_config(settings.WorkerSettings(), args, None, True).asks_certificate
