"""A router host needs no GPU stack: the base install alone starts and serves."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.unit.router.fake_worker import TRANSFER, FakeWorker
from vllm_pd.graph.ports import free_port
from vllm_pd.graph.process import ManagedProcess, ProcessSpec

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALL_DEADLINE_S = 280
READY_DEADLINE_S = 120

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def base_install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment that holds the package without extras."""
    folder = tmp_path_factory.mktemp("base")
    # Built from a copy: setuptools writes build/ and egg-info beside the sources.
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "logs", "shared", "__pycache__")
    shutil.copytree(REPOSITORY, source, ignore=ignored)
    venv = [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")]
    subprocess.run(venv, check=True, timeout=INSTALL_DEADLINE_S)
    bin_folder = folder / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(bin_folder / "python"), "--disable-pip-version-check"]
    command = [*pip, "install", "--quiet", "--no-compile", str(source)]
    done = subprocess.run(command, check=False, timeout=INSTALL_DEADLINE_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return bin_folder


@pytest.mark.parametrize("module", ["torch", "vllm", "nixl", "transformers", "numpy"])
def test_base_install_has_no_gpu_stack(base_install: Path, module: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(base_install / "python"), "-c", f"import {module}"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert f"No module named '{module}'" in done.stderr


async def test_router_of_the_base_install_serves_a_split_request(base_install: Path, tmp_path: Path) -> None:
    prefill, decode = await FakeWorker().start(), await FakeWorker().start()
    port = free_port()
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_PD_", "PYTHON"))}
    command = [str(base_install / "vllm-pd-router"), "--port", str(port)]
    command += ["--worker", f"{prefill.url}=prefill", "--worker", f"{decode.url}=decode", "--disagg", "always"]
    router = ManagedProcess(ProcessSpec("router", command, tmp_path / "router.log", env=environ, cwd=tmp_path))
    body = json.dumps({"model": "m", "prompt": list(range(100)), "max_tokens": 9}).encode()

    def ask() -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()

    try:
        with router:
            ready = f"http://127.0.0.1:{port}/ready"
            await asyncio.to_thread(router.wait_ready, ready, deadline_s=READY_DEADLINE_S)
            # The first worker that answered its probe may be alone for a moment; a whole request is an answer too.
            for _ in range(50):
                status, answer = await asyncio.to_thread(ask)
                assert status == 200
                if prefill.posts:
                    break
                await asyncio.sleep(0.1)
            assert json.loads(answer)["object"] == "text_completion"
            assert decode.posts[-1].json["kv_transfer_params"] == TRANSFER
    finally:
        await prefill.stop()
        await decode.stop()
    assert router.returncode == 0
