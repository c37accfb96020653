"""A cluster without models, of real processes on loopback: a store, mock workers, and routers before them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import string
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.load import http_request
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.graph.metrics_text import scrape
from vllm_pd.graph.ports import LOOPBACK, free_port, free_ports
from vllm_pd.graph.process import ManagedProcess, ProcessSpec

START_DEADLINE_S = 60.0
MODEL = "mock"


@dataclass(frozen=True, slots=True)
class MockWorker:
    """A worker of a `MockCluster`, always on the same port."""

    role: str
    url: str
    process: ManagedProcess

    def start(self) -> None:
        """Start it (again) and wait until it answers.

        Raises:
            ProcessError: it did not start.
        """
        self.process.start().wait_ready(f"{self.url}/health", deadline_s=START_DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        """Nothing if it does not run."""
        if self.process.is_running:
            os.kill(self.process.pid, number)


@dataclass(frozen=True, slots=True)
class MockRouter:
    """A router of a `MockCluster`: where it listens, and its process."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return _url(self.port)

    def dispatched(self, way: str) -> int:
        """How many prefill legs went well on that way.

        Raises:
            OSError: it does not answer.
        """
        found = scrape(_url(self.port)).value("vllm_pd_router_prefill_dispatch_total", way=way, outcome="done")
        return int(found)


class MockCluster:
    """Everything that it starts is ended with it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._logs = Path(tempfile.mkdtemp(prefix="mock-cluster-"))
        self._stack.callback(shutil.rmtree, self._logs, ignore_errors=True)
        self.store = EmbeddedStore()

    def worker(self, role: str, *flags: str) -> MockWorker:
        """A mock worker in a process of its own, once it answers.

        Raises:
            ProcessError: it did not start.
        """
        (found,) = self.start_workers((role,), *flags)
        return found

    def start_workers(self, roles: Sequence[str], *flags: str) -> list[MockWorker]:
        """The same for several at a time.

        Raises:
            ProcessError: one did not start.
        """
        workers = []
        for role, port in zip(roles, free_ports(len(roles)), strict=True):
            command = [sys.executable, "-m", "vllm_pd.cli", "mock-worker", "--port", str(port), "--role", role]
            process = self._process(f"{role}-{port}", [*command, "--store", self.store.url, *flags])
            workers.append(MockWorker(role, _url(port), process))
        for worker in workers:
            worker.process.wait_ready(f"{worker.url}/health", deadline_s=START_DEADLINE_S)
        return workers

    def router(self, *flags: str) -> MockRouter:
        """A router, once it is ready.

        Raises:
            ProcessError: it did not start.
        """
        port = free_port()
        command = [sys.executable, "-m", "vllm_pd.router.cli", "--log-level", "error", "--port", str(port)]
        process = self._process(f"router-{port}", [*command, "--store", self.store.url, *flags])
        process.wait_ready(_url(port, "/ready"), deadline_s=START_DEADLINE_S)
        return MockRouter(port, process.pid)

    def run(self, name: str, command: Sequence[str]) -> ManagedProcess:
        """Another process of the benchmark's own; not waited for.

        Raises:
            ProcessError: it did not start.
        """
        return self._process(name, command)

    def _process(self, name: str, command: Sequence[str]) -> ManagedProcess:
        return self._stack.enter_context(ManagedProcess(ProcessSpec(name, command, self._logs / f"{name}.log")))

    def __enter__(self) -> MockCluster:
        self._stack.enter_context(self.store)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def new_prompt(chance: random.Random, tokens: int, *, output: int = 4) -> bytes:
    """A streamed completion whose prompt none before had, as bytes of HTTP. Mock workers take a byte for a token."""
    prompt = "".join(chance.choices(string.ascii_lowercase, k=tokens))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": output, "stream": True, "ignore_eos": True}
    return http_request("/v1/completions", json.dumps(body).encode())


def _url(port: int, path: str = "") -> str:
    return f"http://{LOOPBACK}:{port}{path}"
