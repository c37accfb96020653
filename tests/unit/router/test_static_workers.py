"""Workers named on the command line, with and without TLS and API keys."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.certificates import Authority
from tests.unit.router.conftest import LONG, StartWorker, until
from tests.unit.router.fake_worker import FakeWorker
from vllm_pd.errors import SettingsError
from vllm_pd.router import static_probe
from vllm_pd.router.service import RouterService
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.static_probe import StaticWorker, block_size_in
from vllm_pd.state import Role

BODY = json.dumps({"prompt": LONG, "max_tokens": 9}).encode()
StartRouter = Callable[..., Awaitable[RouterService]]


@pytest.fixture
async def start_router() -> AsyncIterator[StartRouter]:
    started: list[RouterService] = []

    async def start(*workers: tuple[FakeWorker, Role], **settings: Any) -> RouterService:
        static = tuple(StaticWorker(worker.url, role) for worker, role in workers)
        values = replace(
            RouterSettings(), port=0, workers=static, shutdown_grace=1.0, **{"disagg": "always", **settings}
        )
        service = RouterService(values, refresh_s=0.02)
        await service.start()
        started.append(service)
        return service

    yield start
    for service in started:
        await service.stop()


async def post(router: RouterService, body: bytes = BODY) -> tuple[int, bytes]:
    url = f"http://127.0.0.1:{router.port}/v1/completions"
    async with aiohttp.ClientSession() as client, client.post(url, data=body) as reply:
        return reply.status, await reply.read()


async def known(router: RouterService, count: int) -> None:
    await until(lambda: len(router.directory.workers) == count, f"{count} workers are known")


async def test_named_workers_serve_a_split_request_without_a_store(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    prefill, decode = await start_worker(), await start_worker()
    router = await start_router((prefill, Role.PREFILL), (decode, Role.DECODE))
    await known(router, 2)
    assert (await post(router))[0] == 200
    assert len(prefill.posts) == len(decode.posts) == 1
    assert {worker.record.pool.block_size for worker in router.directory.workers} == {32}


async def test_named_worker_without_block_size_counts_as_16(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    worker.metrics = "# nothing\n"
    router = await start_router((worker, Role.BOTH))
    await known(router, 1)
    assert router.directory.workers[0].record.pool.block_size == 16


async def test_named_worker_comes_and_goes_with_its_health(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    worker.healthy = False
    router = await start_router((worker, Role.BOTH))
    assert (await post(router))[0] == 503
    worker.healthy = True
    await known(router, 1)
    await worker.stop()
    await known(router, 0)
    await worker.start()
    await known(router, 1)
    assert (await post(router))[0] == 200


async def test_named_worker_that_is_late_a_few_times_keeps_its_place(
    start_router: StartRouter,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(static_probe, "DEADLINE_S", 0.1)
    worker = await start_worker()
    router = await start_router((worker, Role.BOTH))
    await known(router, 1)
    entry = router.directory.workers[0]
    rounds = 0
    replace_all = router.directory.replace

    def count(*arguments: Any, **options: Any) -> None:
        nonlocal rounds
        replace_all(*arguments, **options)
        rounds += 1

    monkeypatch.setattr(router.directory, "replace", count)
    worker.frozen = True
    await until(lambda: rounds >= static_probe.MAX_LATE, "a few rounds passed")
    assert router.directory.workers == [entry]
    await until(lambda: not router.directory.workers, "it is gone after more rounds")
    assert "no answer within 0.1 s" in caplog.text
    worker.frozen = False
    await known(router, 1)


async def test_worker_that_asks_for_a_key_is_probed_and_served_with_it(
    start_router: StartRouter, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await start_worker(api_key="secret-key")
    router = await start_router((worker, Role.BOTH))
    await until(lambda: "set VLLM_PD_WORKER_API_KEY" in caplog.text, "the log says what to set")
    assert router.directory.workers == []
    router = await start_router((worker, Role.BOTH), worker_api_key="secret-key")
    await known(router, 1)
    assert (await post(router))[0] == 200
    assert "secret-key" not in caplog.text


async def test_tls_worker_is_served_with_its_authority(
    start_router: StartRouter, start_worker: StartWorker, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    worker = await start_worker(tls=authority.server_context(authority.issue("worker")))
    router = await start_router((worker, Role.BOTH), worker_ca=str(authority.pem))
    await known(router, 1)
    assert (await post(router))[0] == 200


async def test_tls_worker_with_an_unknown_certificate_is_refused_unless_told_otherwise(
    start_router: StartRouter, start_worker: StartWorker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    worker = await start_worker(tls=authority.server_context(authority.issue("worker")))
    router = await start_router((worker, Role.BOTH))
    await until(lambda: "TLS certificate is not trusted" in caplog.text, "the log says why")
    assert router.directory.workers == []
    router = await start_router((worker, Role.BOTH), worker_insecure=True)
    await known(router, 1)
    assert (await post(router))[0] == 200


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_unusable_ca_file_is_a_settings_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    settings = replace(RouterSettings(), workers=(StaticWorker("https://h:1", Role.BOTH),), worker_ca=str(path))
    with pytest.raises(SettingsError, match="--worker-ca"):
        RouterService(settings)


@pytest.mark.parametrize(
    ("page", "size"),
    [
        ('vllm:cache_config_info{a="x}",block_size="128",engine="0"} 1.0', 128),
        ("# HELP vllm:cache_config_info x\nother 1\n", None),
        ('vllm:cache_config_info{block_size="None"} 1.0', None),
        ('vllm:cache_config_info{block_size="0"} 1.0', None),
    ],
)
def test_block_size_is_read_from_a_metrics_page(page: str, size: int | None) -> None:
    assert block_size_in(page) == size
