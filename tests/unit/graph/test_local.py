"""LocalCluster's start and end, with small programs in the places of `vllm` and `vllm-pd-router`.

The programs are real processes with real sockets; what a worker does beyond starting and ending is for tests/e2e.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import pytest

from vllm_pd.graph.local import LocalCluster
from vllm_pd.graph.machine import Machine
from vllm_pd.graph.ports import is_listening
from vllm_pd.graph.process import ProcessError
from vllm_pd.state.base import Role

CPU = Machine(cores=(0, 1))

PROGRAM = """#!{python}
import http.server, json, os, signal, sys
from multiprocessing import resource_tracker, shared_memory

args = sys.argv[1:]
if "--crash" in args:
    sys.exit("this model does not fit")
if "--shared-memory" in args:
    memory = shared_memory.SharedMemory(name=args[args.index("--shared-memory") + 1], create=True, size=4096)
    resource_tracker.unregister(memory._name, "shared_memory")
if "--deaf" in args:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path in ("/health", "/ready", "/metrics", "/args")
        self.send_response(200 if known and "--never-ready" not in args else 503)
        self.end_headers()
        if self.path == "/args":
            self.wfile.write(json.dumps([args, dict(os.environ)]).encode())
        if self.path == "/metrics":
            self.wfile.write(b'vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} 3.0\\n')
            self.wfile.write(b'vllm:prompt_tokens_by_source_total{{engine="0",source="external_kv_transfer"}} 4.0\\n')


port = int(args[args.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for name in ("vllm", "vllm-pd-router"):
        (folder / name).write_text(PROGRAM.format(python=sys.executable))
        (folder / name).chmod(0o755)
    return folder


def asked(url: str) -> tuple[list[str], dict[str, str]]:
    with urllib.request.urlopen(f"{url}/args", timeout=10) as answer:
        args, env = json.load(answer)
    return args, env


def test_a_cluster_starts_store_workers_and_router_and_leaves_nothing(programs: Path, tmp_path: Path) -> None:
    waited: list[tuple[float, list[str]]] = []
    cluster = LocalCluster(model="m", prefill=1, decode=2, on=CPU, programs=programs, log_dir=tmp_path)
    cluster.start(progress=lambda seconds, names: waited.append((seconds, list(names))))
    try:
        assert [w.name for w in cluster.workers] == ["prefill-0", "decode-0", "decode-1"]
        assert [w.role for w in cluster.workers] == [Role.PREFILL, Role.DECODE, Role.DECODE]
        assert cluster.worker("decode-1") in cluster.of_role(Role.DECODE)
        assert cluster.store is not None
        ports = [w.spec.port for w in cluster.workers] + [cluster.store.port]
        assert all(is_listening(port) for port in ports)
        args, _ = asked(cluster.router_url)
        assert args[args.index("--store") + 1] == cluster.store_url
        # Whoever is ready at the first look is in no report.
        assert {name for _, names in waited for name in names} <= {*(w.name for w in cluster.workers), "router"}
        assert waited[-1][1] == []
    finally:
        assert not cluster.stop(), cluster.left
    assert not any(is_listening(port) for port in ports)
    assert not cluster.stop()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["decode-0.log", "decode-1.log", "prefill-0.log", "router.log"]


def test_workers_are_told_role_store_and_their_own_core(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PD_ROLE", "both")
    with LocalCluster(
        model=tmp_path, prefill=1, decode=1, on=CPU, programs=programs, worker_args=["--x"], env={"Y": "1"}
    ) as cluster:
        for worker, role, core in zip(cluster.workers, ("prefill", "decode"), ("0", "1"), strict=True):
            args, env = asked(worker.url)
            assert args[:2] == ["serve", str(tmp_path)]
            assert args[args.index("--role") + 1] == role
            assert args[args.index("--kv-connector") + 1] == "pd"
            assert args[args.index("--pd-store") + 1] == cluster.store_url
            assert args[args.index("--block-size") + 1] == "32"
            assert args[-1] == "--x"
            assert (env["VLLM_CPU_OMP_THREADS_BIND"], env["HF_HUB_OFFLINE"], env["Y"]) == (core, "1", "1")
            assert "VLLM_PD_ROLE" not in env


def test_workers_on_gpus_get_one_each_and_share_when_there_are_too_few(programs: Path) -> None:
    machine = Machine(cores=(0, 1), gpus=("0", "1"))
    with LocalCluster(model="m", prefill=1, decode=2, on=machine, programs=programs) as cluster:
        seen = [asked(worker.url) for worker in cluster.workers]
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in seen] == ["0", "1", "0"]
    for args, _ in seen:
        assert args[args.index("--gpu-memory-utilization") + 1] == "0.40"
        assert "--enforce-eager" not in args


def test_without_a_store_the_router_is_told_its_workers(programs: Path) -> None:
    with LocalCluster(model="m", prefill=1, both=1, store=False, on=CPU, programs=programs) as cluster:
        args, _ = asked(cluster.router_url)
        told = [args[i + 1] for i, arg in enumerate(args) if arg == "--worker"]
        assert told == [f"{worker.url}={worker.role}" for worker in cluster.workers]
        assert "--store" not in args


def test_plain_workers_need_neither_router_nor_store(programs: Path) -> None:
    with LocalCluster(model="m", plain=1, on=CPU, programs=programs) as cluster:
        args, _ = asked(cluster.workers[0].url)
        assert not [arg for arg in args if arg.startswith(("--pd", "--kv-connector", "--kv-transfer", "--role"))]
        assert cluster.store is None
        assert cluster.router is None
        with pytest.raises(ProcessError, match="without a router"):
            _ = cluster.router_url


def test_metrics_are_summed_by_name_and_selected_by_label(programs: Path) -> None:
    with LocalCluster(model="m", plain=1, on=CPU, programs=programs) as cluster:
        metrics = cluster.metrics(0)
    assert metrics["vllm:prompt_tokens_by_source_total"] == 7.0
    assert metrics.value("vllm:prompt_tokens_by_source_total", source="local_compute") == 3.0
    assert metrics.value("vllm:prompt_tokens_by_source_total", source="nowhere") == 0.0
    assert "vllm:other" not in metrics


def test_a_worker_that_dies_at_start_ends_the_cluster_and_keeps_its_log(programs: Path) -> None:
    cluster = LocalCluster(model="m", prefill=1, decode=1, on=CPU, programs=programs, worker_args=["--crash"])
    with pytest.raises(ProcessError, match="this model does not fit"):
        cluster.start()
    assert not cluster.leftovers()
    assert "this model does not fit" in (cluster.log_dir / "prefill-0.log").read_text()


def test_a_worker_that_is_never_ready_is_named_at_the_deadline(programs: Path) -> None:
    cluster = LocalCluster(model="m", both=1, on=CPU, programs=programs, worker_args=["--never-ready"])
    with pytest.raises(ProcessError, match="both-0 was not ready after 1 s"):
        cluster.start(deadline_s=1)
    assert not cluster.leftovers()


def test_an_interruption_while_starting_leaves_nothing(programs: Path) -> None:
    def interrupt(waited: float, names: object) -> None:
        raise KeyboardInterrupt

    cluster = LocalCluster(model="m", prefill=1, decode=1, on=CPU, programs=programs)
    with pytest.raises(KeyboardInterrupt):
        cluster.start(progress=interrupt)
    assert not cluster.leftovers()


def test_a_hurried_stop_kills_what_ignores_sigterm_and_reports_nothing_left(programs: Path) -> None:
    cluster = LocalCluster(model="m", both=1, on=CPU, programs=programs, worker_args=["--deaf"]).start()
    assert not cluster.stop(grace_s=600, hurry=lambda: True)


def test_shared_memory_of_a_killed_worker_is_reported_and_removed(programs: Path, tmp_path: Path) -> None:
    name = f"vllm_pd_{tmp_path.name}"
    arguments = ["--shared-memory", name]
    cluster = LocalCluster(model="m", both=1, on=CPU, programs=programs, worker_args=arguments).start()
    cluster.workers[0].process.kill()
    assert cluster.stop().shared_memory == (f"/dev/shm/{name}",)
    assert not Path("/dev/shm", name).exists()


def test_a_killed_worker_restarts_under_its_old_address(programs: Path) -> None:
    with LocalCluster(model="m", both=1, on=CPU, programs=programs) as cluster:
        worker = cluster.workers[0]
        worker.process.kill()
        assert not is_listening(worker.spec.port)
        cluster.restart(worker)
        assert is_listening(worker.spec.port)
        extra = cluster.add_worker(Role.BOTH, args=["--x"])
        assert extra.name == "both-1"
        assert asked(extra.url)[0][-1] == "--x"
