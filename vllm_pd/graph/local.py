"""A whole cluster on this machine: store, workers and router as processes, started together and ended without a trace.

    with LocalCluster(model="...", prefill=1, decode=1) as cluster:
        post(cluster.router_url + "/v1/completions", ...)

Used by the demo, the tests and the benchmarks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from vllm_pd.graph import commands, machine, metrics_text
from vllm_pd.graph.commands import EngineSpec, RouterSpec, WorkerSpec
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.graph.machine import Machine
from vllm_pd.graph.metrics_text import Metrics
from vllm_pd.graph.ports import free_ports, is_listening
from vllm_pd.graph.process import Leftovers, ManagedProcess, ProcessError, ProcessSpec, Ready
from vllm_pd.state.base import Role

Progress = Callable[[float, Sequence[str]], None]
"""Gets the seconds since the start and the names of what is not ready yet, several times a second. It may raise."""

DEFAULT_START_DEADLINE_S = 300.0
STOP_GRACE_S = 30.0
_ROUTER_GRACE_S = 10.0
_START_GRACE_S = 5.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """A worker of a running cluster."""

    spec: WorkerSpec
    process: ManagedProcess

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def role(self) -> Role | None:
        return self.spec.role

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def health_url(self) -> str:
        return f"{self.url}/health"

    def metrics(self) -> Metrics:
        """Its `/metrics` now. Raises OSError when it does not answer."""
        return metrics_text.scrape(self.url)


class LocalCluster:
    """Store, workers and router. `with` starts them, waits until the router is ready, and ends them.

    Args:
        model: folder or hub name of the model.
        prefill, decode, both: how many workers of each role.
        plain: how many `vllm serve` without vllm-pd, to compare with.
        router: whether to start a router; None means: if any worker has a role.
        store: True for an embedded one (if any worker has a role), False for none (the router is then told its
            workers), or the URL of yours.
        namespace: separates clusters that share a store.
        worker_args, router_args: further arguments for every worker, or for the router.
        env: further variables for every worker.
        log_dir: folder for one log per process, kept; None makes a temporary one, removed at the end of a run that
            started well.
        max_model_len, block_size, kv_blocks: see `EngineSpec`.
        on: the machine; None looks at this one.
        programs: folder with `vllm` and `vllm-pd-router`; None is that of the running Python.
    """

    def __init__(
        self,
        *,
        model: str | Path,
        prefill: int = 0,
        decode: int = 0,
        both: int = 0,
        plain: int = 0,
        router: bool | None = None,
        store: bool | str = True,
        namespace: str = "default",
        worker_args: Sequence[str] = (),
        router_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
        max_model_len: int = 2048,
        block_size: int = 32,
        kv_blocks: int = 128,
        on: Machine | None = None,
        programs: Path | None = None,
    ) -> None:
        self.engine = EngineSpec(str(model), max_model_len, block_size, kv_blocks, tuple(worker_args))
        self.namespace = namespace
        self.machine = on if on is not None else machine.detect()
        self.programs = programs if programs is not None else Path(sys.executable).parent
        self.log_dir = log_dir if log_dir is not None else Path(tempfile.mkdtemp(prefix="vllm-pd-logs-"))
        self._has_own_logs = log_dir is None
        has_roles = prefill + decode + both > 0
        self.store = EmbeddedStore() if store is True and has_roles else None
        self._store_url = store if isinstance(store, str) else ""
        self._env = dict(env or {})
        counts: list[tuple[Role | None, int]] = [
            (Role.PREFILL, prefill),
            (Role.DECODE, decode),
            (Role.BOTH, both),
            (None, plain),
        ]
        roles = [(role, n) for role, count in counts for n in range(count)]
        ports = free_ports(len(roles) + 1)
        self._planned = [
            WorkerSpec(f"{role or 'plain'}-{n}", role, port, env=self._env)
            for (role, n), port in zip(roles, ports, strict=False)
        ]
        with_router = has_roles if router is None else router
        self._router_spec = RouterSpec(ports[-1], args=tuple(router_args)) if with_router else None
        self.workers: list[LocalWorker] = []
        self.router: ManagedProcess | None = None
        self.left = Leftovers()
        """What the last `stop` found."""
        self._is_stopped = False
        self._removes_logs = False

    @property
    def router_url(self) -> str:
        """Base URL of the router. Raises ProcessError when the cluster has none."""
        if self._router_spec is None:
            raise ProcessError("This cluster was made without a router; pass router=True.")
        return self._router_spec.url

    @property
    def store_url(self) -> str:
        """URL of the store; empty when there is none."""
        return self.store.url if self.store is not None else self._store_url

    def worker(self, name: str) -> LocalWorker:
        """The worker called `name` (`prefill-0`, `decode-1`, `plain-0`). Raises KeyError."""
        return {worker.name: worker for worker in self.workers}[name]

    def of_role(self, role: Role | None) -> list[LocalWorker]:
        """The workers that were started with this role; None means the plain ones."""
        return [worker for worker in self.workers if worker.role is role]

    def metrics(self, worker: LocalWorker | int) -> Metrics:
        """`/metrics` of a worker, given itself or its place in `workers`. Raises OSError."""
        return (self.workers[worker] if isinstance(worker, int) else worker).metrics()

    def router_metrics(self) -> Metrics:
        """`/metrics` of the router. Raises OSError."""
        return metrics_text.scrape(self.router_url)

    def start(
        self,
        *,
        progress: Progress | None = None,
        deadline_s: float = DEFAULT_START_DEADLINE_S,
        hurry: Callable[[], bool] = lambda: False,
    ) -> LocalCluster:
        """Start everything and wait until it is ready; on any error or interruption everything is ended first.

        `hurry` is for that end, see `stop`.

        Raises:
            ProcessError: something died or was not ready in time; the message holds the end of its log.
            StoreError: the embedded store did not start.
        """
        self._is_stopped = self._removes_logs = False
        self.workers, self.router = [], None
        try:
            if self.store is not None:
                self.store.start()
            started = time.monotonic()
            waves = [machine.start_wave(self.machine, index) for index in range(len(self._planned))]
            for wave in sorted(set(waves)):
                group = [self._launch(spec) for spec, its in zip(self._planned, waves, strict=True) if its == wave]
                _wait({worker.process: worker.health_url for worker in group}, started, deadline_s, progress)
            if self._router_spec is not None:
                _wait(
                    {self._launch_router(self._router_spec): f"{self.router_url}/ready"}, started, deadline_s, progress
                )
        except BaseException:
            # A worker that is still loading has nothing to hand over, and may ignore SIGTERM for as long.
            self.stop(grace_s=_START_GRACE_S, hurry=hurry)
            raise
        self._removes_logs = self._has_own_logs
        return self

    def add_worker(
        self,
        role: Role | None,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        deadline_s: float = DEFAULT_START_DEADLINE_S,
    ) -> LocalWorker:
        """Start one more worker and wait until it answers. Raises ProcessError."""
        name = f"{role or 'plain'}-{len(self.of_role(role))}"
        spec = WorkerSpec(name, role, free_ports(1)[0], tuple(args), self._env | dict(env or {}))
        worker = self._launch(spec)
        _wait({worker.process: worker.health_url}, time.monotonic(), deadline_s)
        return worker

    def restart(self, worker: LocalWorker, *, deadline_s: float = DEFAULT_START_DEADLINE_S) -> None:
        """Start a worker that ended or was killed again, under its old address. Raises ProcessError."""
        worker.process.start()
        _wait({worker.process: worker.health_url}, time.monotonic(), deadline_s)

    def stop(self, *, grace_s: float = STOP_GRACE_S, hurry: Callable[[], bool] = lambda: False) -> Leftovers:
        """End everything: router, then all workers at once, then the store. Idempotent.

        Args:
            grace_s: how long workers may take before they are killed.
            hurry: asked several times a second; true cuts the grace short.

        Returns:
            What was left although every process had been ended; shared memory among it is then removed.
        """
        if self._is_stopped:
            return self.left
        with contextlib.ExitStack() as steps:
            # Last in, first out; each step runs even if an interruption cuts the one before it short.
            if self.store is not None:
                steps.callback(self.store.stop)
            steps.callback(_end, [worker.process for worker in self.workers], grace_s, hurry)
            if self.router is not None:
                steps.callback(_end, [self.router], _ROUTER_GRACE_S, hurry)
        self.left = self.leftovers()
        for path in self.left.shared_memory:
            Path(path).unlink(missing_ok=True)
        if self._removes_logs:
            shutil.rmtree(self.log_dir, ignore_errors=True)
        self._is_stopped = True
        return self.left

    def leftovers(self) -> Leftovers:
        """What runs, listens or lies in /dev/shm now and belongs to this cluster."""
        processes = [worker.process for worker in self.workers] + ([self.router] if self.router is not None else [])
        ports = [worker.spec.port for worker in self.workers]
        if self.router is not None and self._router_spec is not None:
            ports.append(self._router_spec.port)
        if self.store is not None and self.store.port:
            ports.append(self.store.port)
        return Leftovers(
            processes=tuple(f"{p.spec.name} ({left.pid})" for p in processes for left in p.left_processes()),
            ports=tuple(port for port in ports if is_listening(port)),
            shared_memory=tuple(sorted({path for p in processes for path in p.left_shared_memory()})),
        )

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self, spec: WorkerSpec) -> LocalWorker:
        index = len(self.workers)
        place = machine.even_place(self.machine, index, max(len(self._planned), index + 1))
        command = commands.worker_command(
            spec, self.engine, place, programs=self.programs, store=self.store_url, namespace=self.namespace
        )
        env = commands.worker_env(spec, self.engine, place, inherited=os.environ)
        worker = LocalWorker(spec, self._process(spec.name, command, env))
        # Known before it runs, so that an interruption right after the start still ends it.
        self.workers.append(worker)
        worker.process.start()
        return worker

    def _launch_router(self, spec: RouterSpec) -> ManagedProcess:
        command = commands.router_command(
            spec,
            [worker.spec for worker in self.workers],
            programs=self.programs,
            store=self.store_url,
            namespace=self.namespace,
        )
        self.router = self._process(spec.name, command, commands.router_env(spec, inherited=os.environ))
        return self.router.start()

    def _process(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> ManagedProcess:
        return ManagedProcess(ProcessSpec(name, command, self.log_dir / f"{name}.log", env))


def _wait(
    pending: Mapping[ManagedProcess, Ready], started: float, deadline_s: float, progress: Progress | None = None
) -> None:
    """Wait until all are ready. Raises ProcessError when one dies or the deadline, counted from `started`, passes."""
    left = dict(pending)
    while left:
        for process in [process for process, ready in left.items() if process.probe(ready)]:
            process.observe()
            del left[process]
        waited = time.monotonic() - started
        if left and waited > deadline_s:
            next(iter(left)).give_up(deadline_s)
        if progress is not None:
            progress(waited, [process.spec.name for process in left])
        if left:
            time.sleep(_POLL_S)


def _end(processes: Sequence[ManagedProcess], grace_s: float, hurry: Callable[[], bool]) -> None:
    """End all of them at once; after the grace, or on any interruption, what is left of their families is killed."""
    deadline = time.monotonic() + grace_s
    try:
        for process in processes:
            process.terminate()
        while any(p.is_running for p in processes) and time.monotonic() < deadline and not hurry():
            time.sleep(_POLL_S)
    finally:
        for process in processes:
            process.kill()
