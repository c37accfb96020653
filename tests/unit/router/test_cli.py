"""The command as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from tests.unit.router.conftest import WAIT_S, StartWorker, until
from tests.unit.router.fake_worker import FakeWorker, hang

COMMAND = [sys.executable, "-m", "vllm_pd.router.cli"]
ENVIRON = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_PD_")}
STREAM = json.dumps({"prompt": "hi", "stream": True}).encode()


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env={**ENVIRON, **environ}, check=False
    )


class Process:
    """A running router."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[str] = []
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())

    @property
    def port(self) -> int:
        found = re.search(r"listens on 127\.0\.0\.1:(\d+)", "".join(self.log))
        return int(found[1]) if found else 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), WAIT_S)


StartProcess = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start_process() -> AsyncIterator[StartProcess]:
    started: list[Process] = []

    async def start(worker: FakeWorker, *arguments: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--port", "0", "--worker", f"{worker.url}=both", *arguments, stderr=subprocess.PIPE, env=ENVIRON
        )
        started.append(Process(process))
        await until(lambda: started[-1].port, "it listens")
        await until(lambda: "joined" in "".join(started[-1].log), "it found the worker")
        return started[-1]

    yield start
    for process in started:
        if process.process.returncode is None:
            process.process.kill()
            await process.process.wait()
        await process.reader


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_lets_requests_in_flight_finish_and_ends_with_status_0(
    start_process: StartProcess, start_worker: StartWorker, number: signal.Signals
) -> None:
    worker = await start_worker()
    worker.gate = asyncio.Event()
    router = await start_process(worker)
    async with aiohttp.ClientSession() as client, client.post(router.url + "/v1/completions", data=STREAM) as reply:
        await reply.content.readany()
        router.process.send_signal(number)
        await _drains(client, router)
        # Who asks meanwhile is told so at once, on a connection that is closed then.
        async with client.post(router.url + "/v1/completions", data=STREAM) as refused:
            assert refused.status == 503
            assert refused.headers["Retry-After"]
            assert refused.headers["Connection"] == "close"
            assert "draining" in (await refused.json())["error"]["message"]
        async with client.get(router.url + "/health") as health:
            assert health.status == 200
        worker.gate.set()
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")
    assert await router.status() == 0
    assert len(worker.posts) == 1


async def test_idle_router_ends_at_once(start_process: StartProcess, start_worker: StartWorker) -> None:
    router = await start_process(await start_worker(), "--shutdown-grace", "3600")
    router.process.terminate()
    assert await router.status() == 0


async def test_second_signal_ends_at_once(start_process: StartProcess, start_worker: StartWorker) -> None:
    worker = await start_worker()
    worker.gate = asyncio.Event()
    router = await start_process(worker)
    async with aiohttp.ClientSession() as client, client.post(router.url + "/v1/completions", data=STREAM) as reply:
        await reply.content.readany()
        router.process.terminate()
        await _drains(client, router)
        router.process.terminate()
        assert await router.status() == 128 + signal.SIGTERM


async def test_streams_longer_than_the_grace_time_end_with_an_error_event(
    start_process: StartProcess, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    worker.gate = asyncio.Event()
    router = await start_process(worker, "--shutdown-grace", "0.2")
    async with aiohttp.ClientSession() as client, client.post(router.url + "/v1/completions", data=STREAM) as reply:
        await reply.content.readany()
        router.process.terminate()
        rest = await reply.read()
        assert "This router is being stopped" in json.loads(rest.strip().removeprefix(b"data: "))["error"]["message"]
        assert await router.status() == 0
    await until(worker.posts[0].cancelled.is_set, "the worker was told")


async def test_requests_without_a_first_byte_are_refused_after_the_grace_time(
    start_process: StartProcess, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    worker.hook = hang
    router = await start_process(worker, "--shutdown-grace", "0.2")
    async with aiohttp.ClientSession() as client:
        asking = asyncio.create_task(client.post(router.url + "/v1/completions", data=STREAM))
        await worker.arrived.wait()
        router.process.terminate()
        async with await asking as reply:
            assert reply.status == 503
            assert "This router is being stopped" in (await reply.json())["error"]["message"]
    assert await router.status() == 0


async def _drains(client: aiohttp.ClientSession, router: Process) -> None:
    async with asyncio.timeout(60):
        while True:
            async with client.get(router.url + "/ready") as ready:
                if ready.status == 503:
                    assert "draining" in (await ready.json())["reason"]
                    return
            await asyncio.sleep(0.01)


async def test_log_holds_one_line_for_the_start_and_none_for_requests(
    start_process: StartProcess, start_worker: StartWorker
) -> None:
    router = await start_process(await start_worker(), "--store", "redis://user:hunter2@127.0.0.1:1/0")
    await until(lambda: "store lost" in "".join(router.log), "it asked the store")
    before = len(router.log)
    async with aiohttp.ClientSession() as client:
        for _ in range(3):
            async with client.post(router.url + "/v1/completions", data=STREAM) as reply:
                await reply.read()
    router.process.terminate()
    assert await router.status() == 0
    text = "".join(router.log)
    assert "store redis://user:***@127.0.0.1:1/0, namespace default" in text
    assert "hunter2" not in text
    assert [line for line in router.log[before:] if "stopping" not in line] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no way to find workers"),
        (["--store", "http://x"], "--store cannot be used: the store URL 'http://x' must begin with"),
        (["--port", "x", "--store", "redis://x"], "--port must be a number"),
        (["--unknown"], "unrecognized arguments: --unknown; see vllm-pd-router --help."),
        (["--config", "/nonexistent.yaml"], "cannot be read"),
        (["--worker", "http://x:1=both", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8080"),
    ],
)
def test_mistake_ends_with_one_sentence_and_status_2(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("vllm-pd-router: error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_file_and_variable_are_read(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("port: 70000\nstore: redis://x\n")
    assert f"port in {path} must be" in run("--config", str(path)).stderr
    assert "VLLM_PD_ROUTER_PORT must be" in run("--config", str(path), VLLM_PD_ROUTER_PORT="x").stderr


def test_help_names_every_variable_and_has_examples() -> None:
    text = run("--help").stdout
    assert "examples:" in text
    assert "VLLM_PD_WORKER_API_KEY" in text
    assert "vllm-pd-router --store redis://" in text


def test_router_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, vllm_pd.router.cli; "
        "print({'torch', 'vllm', 'transformers'} & {name.split('.')[0] for name in sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"
