"""The processes of the soak: eight mock workers, a router and a store on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from benchmarks.common import cpu_seconds
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.graph.metrics_text import scrape
from vllm_pd.graph.ports import LOOPBACK, free_ports
from vllm_pd.graph.process import ManagedProcess, ProcessSpec

ROLES = ("prefill",) * 3 + ("decode",) * 5
START_DEADLINE_S = 60.0
LEASE_S = 4.0
_MIB = 1 << 20
# A single request that hangs on a worker that is well otherwise is found by its timeout and by nothing else.
_ROUTER_FLAGS = ("--first-byte-timeout", "20", "--idle-timeout", "10")


class SoakWorker:
    """A mock worker in a process of its own, always on the same port."""

    def __init__(self, role: str, port: int, process: ManagedProcess) -> None:
        self.role = role
        self.url = f"http://{LOOPBACK}:{port}"
        self.process = process

    def start(self) -> None:
        """Start it (again) and wait until it answers. Raises ProcessError."""
        self.process.start().wait_ready(f"{self.url}/health", deadline_s=START_DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        """Nothing if it does not run."""
        if self.process.is_running:
            os.kill(self.process.pid, number)


class SoakCluster:
    """Everything that it starts is ended with it."""

    def __init__(self, *, speed: float, sequences: int) -> None:
        self.store = EmbeddedStore()
        self.workers: list[SoakWorker] = []
        self._stack = ExitStack()
        self._logs = Path(tempfile.mkdtemp(prefix="vllm-pd-soak-"))
        self._stack.callback(shutil.rmtree, self._logs, ignore_errors=True)
        self._flags = ["--speed", str(speed), "--max-num-seqs", str(sequences), "--lease", str(LEASE_S)]
        self._router: ManagedProcess | None = None
        self.router_url = ""

    def __enter__(self) -> SoakCluster:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        self._stack.enter_context(self.store)
        *ports, router_port = free_ports(len(ROLES) + 1)
        for role, port in zip(ROLES, ports, strict=True):
            command = [sys.executable, "-m", "vllm_pd.cli", "mock-worker", "--port", str(port), "--role", role]
            process = self._process(f"{role}-{port}", [*command, "--store", self.store.url, *self._flags])
            self.workers.append(SoakWorker(role, port, process))
        for worker in self.workers:
            worker.start()
        self.router_url = f"http://{LOOPBACK}:{router_port}"
        command = [sys.executable, "-m", "vllm_pd.router.cli", "--log-level", "error", "--port", str(router_port)]
        self._router = self._process("router", [*command, "--store", self.store.url, *_ROUTER_FLAGS])
        self._router.wait_ready(f"{self.router_url}/ready", deadline_s=START_DEADLINE_S)

    def _process(self, name: str, command: list[str]) -> ManagedProcess:
        return self._stack.enter_context(ManagedProcess(ProcessSpec(name, command, self._logs / f"{name}.log")))

    @property
    def router_pid(self) -> int:
        return self._router.pid if self._router is not None else 0

    def router_memory(self) -> float:
        """MiB that the router's process has in memory."""
        pages = int(Path(f"/proc/{self.router_pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / _MIB

    def router_caches(self) -> float:
        """MiB that the router keeps of earlier prompts, as it says. Raises OSError."""
        return scrape(self.router_url).value("vllm_pd_router_prompt_cache_bytes") / _MIB

    def router_files(self) -> int:
        """Descriptors that the router's process has open."""
        return sum(1 for _ in Path(f"/proc/{self.router_pid}/fd").iterdir())

    def router_cpu(self) -> float:
        """Seconds of CPU time of the router's process."""
        return cpu_seconds(self.router_pid)
