"""A cluster whose every process and every link can be made to fail: real vLLM workers, or mock ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from tests.e2e.conftest import BLOCK, LEASE_S, MODEL, SETTINGS, WORKER_ARGS
from tests.faults.link import Link
from tests.faults.phases import Traces
from vllm_pd.graph import commands, machine, metrics_text, proc_tree
from vllm_pd.graph.commands import EngineSpec, RouterSpec, WorkerSpec
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.graph.metrics_text import Metrics
from vllm_pd.graph.ports import free_ports
from vllm_pd.graph.proc_tree import ProcessId
from vllm_pd.graph.process import ManagedProcess, ProcessSpec
from vllm_pd.state.base import Role

START_DEADLINE_S = 600.0
"""A worker that starts beside others under load has a small part of the cores."""
STOP_GRACE_S = 40.0
SEQUENCES = 6
"""What one real worker runs at once: few, so that requests also wait."""
_TRACING = Path(__file__).parent / "tracing"
_POLL_S = 0.1
_ENGINE_NAMES = ("EngineCore", "VLLM::EngineCor")

MOCK_MODEL = "mock"


def eventually(holds: Callable[[], object], seconds: float) -> bool:
    """Whether it comes to hold in time. An OSError means: not yet."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, redis.RedisError):
            if holds():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


@dataclass(slots=True)
class Member:
    """A worker. `link` is what stands between it and the router, where there is one."""

    name: str
    role: Role
    url: str
    process: ManagedProcess
    link: Link | None = None
    family: frozenset[ProcessId] = field(default_factory=frozenset)
    """Its processes as they were when it had started."""

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes at once."""
        proc_tree.send(self.family, number)

    def engine(self) -> frozenset[ProcessId]:
        """The process that schedules, of a real worker."""
        return frozenset(p for p in self.family if _command(p.pid).endswith(_ENGINE_NAMES))


class Cluster:
    """Store, workers and a router, with a link before the router, one before the store and one before each real worker.

    Args:
        model: folder of the model; None: mock workers.
        log_dir: gets a log and a trace for each process.
        router_args, worker_args: further arguments.
    """

    def __init__(
        self,
        model: Path | None,
        log_dir: Path,
        *,
        prefill: int = 2,
        decode: int = 2,
        router_args: Sequence[str] = (),
        worker_args: Sequence[str] = (),
    ) -> None:
        self.model = MODEL if model is not None else MOCK_MODEL
        self.members: list[Member] = []
        self.left: list[str] = []
        """Processes that the last `stop` found alive after it had ended them."""
        self.store = EmbeddedStore()
        self._folder = model
        self._log_dir = log_dir
        self._worker_args = tuple(worker_args)
        self._machine = machine.detect()
        self._programs = Path(sys.executable).parent
        roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
        self._total = len(roles)
        ports = free_ports(len(roles) + 1)
        self._planned = list(zip(roles, ports, strict=False))
        # Whatever can be split is: by itself a router would have idle decode workers compute their prompts.
        self._router = RouterSpec(ports[-1], args=("--disagg", "always", *router_args))
        self.front = Link(ports[-1])
        self.store_link = Link(0)
        self.router: ManagedProcess | None = None

    # Start and end.

    def start(self) -> Cluster:
        """Start everything at once and wait until the router knows all. Raises ProcessError or AssertionError."""
        try:
            self.store.start()
            self.store_link.backend_port = self.store.port
            self.store_link.start()
            self.front.start()
            for role, port in self._planned:
                self.launch(role, port)
            for member in self.members:
                self.wait_for(member)
            self.start_router()
            self.wait_whole()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End everything. Idempotent."""
        processes = [member.process for member in self.members] + ([self.router] if self.router else [])
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_GRACE_S
        while any(process.is_running for process in processes) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for process in processes:
            process.kill()
        for link in [self.front, self.store_link, *(member.link for member in self.members if member.link)]:
            link.stop()
        self.store.stop()
        self.left = [str(each) for process in processes for each in process.left_processes()]
        for path in {path for process in processes for path in process.left_shared_memory()}:
            # A worker that was killed cannot clean up; the launcher does it for a cluster.
            Path(path).unlink(missing_ok=True)

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def launch(self, role: Role, port: int = 0) -> Member:
        """Start one more worker; returns at once."""
        port = port or free_ports(1)[0]
        name = f"{role}-{sum(member.role is role for member in self.members)}"
        link = Link(port).start() if self._folder is not None else None
        url = link.url if link is not None else f"http://127.0.0.1:{port}"
        command, env = self._command(name, role, port, url)
        process = ManagedProcess(ProcessSpec(name, command, self._log_dir / f"{name}.log", env))
        member = Member(name, role, f"http://127.0.0.1:{port}", process, link)
        self.members.append(member)
        process.start()
        return member

    def wait_for(self, member: Member) -> None:
        """Wait until a worker that was started answers. Raises ProcessError."""
        member.process.wait_ready(f"{member.url}/health", deadline_s=START_DEADLINE_S)
        leader = proc_tree.identify(member.process.pid)
        assert leader is not None
        member.family = proc_tree.family(leader)

    def restart(self, member: Member) -> None:
        """Start a worker again that has ended, at its old address; returns at once."""
        member.process.start()
        if member.link is not None:
            member.link.heal()

    def forget(self, member: Member) -> None:
        """A worker that has ended is none of the cluster's any more."""
        member.process.kill()
        if member.link is not None:
            member.link.stop()
        self.members.remove(member)

    def start_router(self) -> None:
        """Start the router (again) at its address and wait until it answers. Raises ProcessError."""
        command = commands.router_command(
            self._router, [], programs=self._programs, store=self.store_url, namespace="default"
        )
        env = commands.router_env(self._router, inherited=os.environ)
        if self.router is None:
            self.router = ManagedProcess(ProcessSpec("router", command, self._log_dir / "router.log", env))
        self.router.start()
        self.router.wait_ready(f"{self._router.url}/health", deadline_s=START_DEADLINE_S)

    # What it says.

    @property
    def router_url(self) -> str:
        """Where clients ask."""
        return self.front.url

    @property
    def store_url(self) -> str:
        """What workers and router are told."""
        return f"redis://127.0.0.1:{self.store_link.port}"

    def of_role(self, role: Role) -> list[Member]:
        return [member for member in self.members if member.role is role]

    def traces(self) -> Traces:
        """What the engines write from their start on; mock ones write nothing."""
        members = self.members if self._folder is not None else []
        return Traces({member.name: self._trace(member.name) for member in members})

    def ready_page(self) -> dict[str, Any]:
        """The router's `/ready`. Raises OSError."""
        try:
            with urllib.request.urlopen(f"{self._router.url}/ready", timeout=5) as answer:
                page: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as e:
            page = json.load(e)
        return page

    def wait_whole(self, seconds: float = 60.0) -> None:
        """Wait until the router knows every worker and uses it. Raises AssertionError."""
        wanted = {(member.link.url if member.link else member.url) for member in self.members}

        def is_whole() -> bool:
            page = self.ready_page()
            return page["ready"] and {w["url"] for w in page["workers"] if w["usable"]} == wanted

        assert eventually(is_whole, seconds), f"the router does not know all of {sorted(wanted)}: {self.ready_page()}"

    def router_metrics(self) -> Metrics:
        """What the router counts. Raises OSError."""
        return metrics_text.scrape(self._router.url)

    def unsettled(self) -> list[str]:
        """What is not yet as it is without requests: blocks, engines, the router's counters, the queue."""
        found = []
        for member in self.members:
            if not member.process.is_running:
                continue
            page = metrics_text.scrape(member.url)
            for name in ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"):
                if value := page.value(name):
                    found.append(f"{member.name}: {name.removeprefix('vllm:')} is {value:.3g}")
        router = self.router_metrics()
        if busy := router.value("vllm_pd_router_inflight_requests"):
            found.append(f"router: {busy:g} requests in flight")
        if jobs := self.jobs():
            found.append(f"queue: {len(jobs)} jobs ({', '.join(jobs[:3])})")
        return found

    def jobs(self) -> list[str]:
        """Keys of prefill jobs in the store. Raises RedisError or OSError."""
        with redis.Redis(port=self.store.port, socket_timeout=5) as client:
            return [key.decode(errors="replace") for key in client.scan_iter(match="*:job:*", count=1000)]

    # Commands.

    def _trace(self, name: str) -> Path:
        return self._log_dir / f"{name}.phases"

    def _command(self, name: str, role: Role, port: int, url: str) -> tuple[list[str], dict[str, str]]:
        if self._folder is None:
            command = [str(self._programs / "vllm-pd"), "mock-worker", "--port", str(port), "--role", str(role)]
            command += ["--store", self.store_url, "--lease", str(LEASE_S), *self._worker_args]
            return command, commands.router_env(self._router, inherited=os.environ)
        index = len(self.members)
        env = SETTINGS | {
            "VLLM_PD_ADVERTISE_URL": url,
            "PHASE_TRACE": str(self._trace(name)),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_TRACING), os.environ.get("PYTHONPATH")))),
        }
        engine = EngineSpec(
            str(self._folder),
            block_size=BLOCK,
            kv_blocks=192,
            args=(*WORKER_ARGS, "--max-num-seqs", str(SEQUENCES), *self._worker_args),
        )
        worker = WorkerSpec(name, role, port, env=env)
        place = machine.even_place(self._machine, index, self._total)
        command = commands.worker_command(
            worker, engine, place, programs=self._programs, store=self.store_url, namespace="default"
        )
        return command, commands.worker_env(worker, engine, place, inherited=os.environ)


def _command(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""
