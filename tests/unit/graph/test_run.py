"""A graph as its user meets it: commands in processes of their own, and supervisors that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.graph.programs import write_programs
from vllm_pd.cli import main
from vllm_pd.errors import GraphError
from vllm_pd.graph import control, launcher, proc_tree, remains, runs, up_command
from vllm_pd.graph.launcher import Cluster
from vllm_pd.graph.model import Decode, Frontend, Graph, Prefill, RestartRule, Router, Worker
from vllm_pd.graph.ports import free_port, is_listening
from vllm_pd.graph.runs import Record, RunFolder
from vllm_pd.graph.status import GraphState, GraphStatus
from vllm_pd.interrupts import Interrupts

WAIT_S = 200.0
RULE = RestartRule(tries=1, first_delay_s=0.01)


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_PD_RUN_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    return write_programs(tmp_path / "programs")


def small(name: str = "g", *, args: tuple[str, ...] = ()) -> Graph:
    chain = Frontend(port=0).link(Router()).link(Decode(1, args=args)).link(Prefill(1))
    return chain.graph(name, model="m", restart=RULE)


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextlib.contextmanager
def started(graph: Graph, programs: Path, *, stays: bool = False) -> Iterator[tuple[Cluster, GraphStatus]]:
    """A graph that is up; whatever becomes of it, nothing of it is left afterwards."""
    cluster = launcher.start(graph, stays=stays, programs=programs)
    record: Record | None = None
    try:
        status = launcher.wait_until_up(cluster.folder)
        record = runs.read_record(cluster.folder)
        yield cluster, status
    finally:
        with contextlib.suppress(GraphError):
            control.ask(cluster.folder, control.Stop(now=True))
        cluster.leave_alone()
        cluster.supervisor.wait(WAIT_S)
        until(lambda: not cluster.folder.is_locked(), "the guard ends")
        if record is not None:
            assert not remains.living(record)


def ports(status: GraphStatus) -> list[int]:
    return [int(i.url.rpartition(":")[2]) for i in status.instances]


def test_a_graph_is_up_while_the_block_runs_and_gone_afterwards(programs: Path) -> None:
    with launcher.running(small(), programs=programs) as cluster:
        status = cluster.status()
        assert status.state is GraphState.UP
        assert all(is_listening(port) for port in ports(status))
        socket_file = cluster.folder.path / "control.sock"
        assert stat.S_IMODE(socket_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(cluster.folder.path.stat().st_mode) == 0o700
        with pytest.raises(GraphError, match="The graph g is up already"):
            launcher.start(small(), programs=programs)
        assert cluster.status().state is GraphState.UP
    assert not any(is_listening(port) for port in ports(status))
    assert not cluster.folder.is_locked()
    assert sorted(p.name for p in cluster.folder.path.iterdir()) == ["lock", "logs", "store"]


def test_what_does_not_come_up_is_said_with_the_end_of_its_log(programs: Path) -> None:
    message = r"decode-0 ended with status 1 \(ValueError: this model does not fit\); its log is .*decode-0\.log"
    with pytest.raises(GraphError, match=message), launcher.running(small(args=("--crash",)), programs=programs):
        pass


def test_everything_ends_when_the_supervisor_is_killed(programs: Path) -> None:
    with started(small(args=("--child", "--deaf")), programs) as (cluster, status):
        os.kill(status.pid, signal.SIGKILL)
        # Nobody else may start it before what is left has ended.
        until(lambda: not cluster.folder.is_locked(), "the guard ends what the supervisor left")
        assert not any(is_listening(port) for port in ports(status))
        with pytest.raises(GraphError, match="The graph g is not up"):
            cluster.status()


def test_a_later_start_ends_what_a_killed_supervisor_and_its_killed_guard_left(programs: Path) -> None:
    with started(small(args=("--child",)), programs) as (cluster, status):
        record = runs.read_record(cluster.folder)
        assert record is not None
        children = Path(f"/proc/{status.pid}/task/{status.pid}/children").read_text().split()
        guards = [c for c in children if "vllm_pd.graph.guard" in Path(f"/proc/{c}/cmdline").read_text()]
        assert len(guards) == 1
        # The guard first: the supervisor would else start another one, and does so only now and then.
        os.kill(status.pid, signal.SIGSTOP)
        os.kill(int(guards[0]), signal.SIGKILL)
        os.kill(status.pid, signal.SIGKILL)
        cluster.supervisor.wait(WAIT_S)
        until(lambda: not cluster.folder.is_locked(), "both are gone")
        assert remains.living(record)
        assert main(["status"]) == 1
        with started(small(), programs) as (_, after):
            assert not remains.living(record)
            assert after.state is GraphState.UP


def test_down_cleans_up_after_a_supervisor_and_a_guard_that_were_killed(
    programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(small(), programs) as (cluster, status):
        record = runs.read_record(cluster.folder)
        assert record is not None
        children = Path(f"/proc/{status.pid}/task/{status.pid}/children").read_text().split()
        os.kill(status.pid, signal.SIGSTOP)
        for child in children:
            if "vllm_pd.graph.guard" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)
        os.kill(status.pid, signal.SIGKILL)
        cluster.supervisor.wait(WAIT_S)
        until(lambda: not cluster.folder.is_locked(), "both are gone")
        assert main(["down", "g"]) == 0
        assert "what its killed supervisor left was ended" in capsys.readouterr().out
        assert not remains.living(record)
        assert main(["down", "g"]) == 1


def test_down_waits_for_a_graph_that_has_just_begun_and_does_not_listen_yet(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(small(), programs) as (cluster, status):
        ask, asked = control.status, 0

        def late(folder: RunFolder, **more: float) -> GraphStatus:
            nonlocal asked
            asked += 1
            if asked < 3:
                raise GraphError("The graph g is not up.")
            return ask(folder, **more)

        monkeypatch.setattr(control, "status", late)
        assert not launcher.stop(cluster.folder, now=True)
        assert not any(is_listening(port) for port in ports(status))


def test_a_graph_that_stops_answering_while_it_comes_up_is_ended(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = []
    start = launcher.start

    def started_here(graph: Graph, *, stays: bool = False) -> Cluster:
        clusters.append(start(graph, stays=stays, programs=programs))
        return clusters[0]

    def silent(folder: RunFolder, **more: object) -> GraphStatus:
        raise GraphError("The supervisor of g did not answer.")

    monkeypatch.setattr(launcher, "start", started_here)
    monkeypatch.setattr(launcher, "wait_until_up", silent)
    with Interrupts() as interrupts, pytest.raises(GraphError, match="did not answer"):
        up_command.start(small(), interrupts, detach=True)
    (cluster,) = clusters
    cluster.supervisor.wait(WAIT_S)
    assert not cluster.folder.is_locked()


def test_a_supervisor_that_ends_before_it_read_its_order_is_said_to_have_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    # Longer than what a pipe holds.
    graph = small(args=tuple(f"--served-model-name={n:080}" for n in range(3000)))
    with pytest.raises(GraphError, match="The supervisor did not begin; its log is"):
        launcher.start(graph)


def test_whoever_looks_whether_a_graph_is_up_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "g").make()
    looking = folder.lock()
    assert looking is not None
    assert folder.lock() is None
    threading.Timer(0.2, os.close, (looking,)).start()
    mine = folder.lock(wait_s=WAIT_S)
    assert mine is not None
    os.close(mine)


def test_what_does_not_end_when_killed_stays_on_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "g").make()
    with subprocess.Popen(["/bin/sleep", "600"], start_new_session=True) as process:
        try:
            found = proc_tree.identify(process.pid)
            assert found is not None
            record = Record("0123", runs.boot_id(), (runs.Started("decode-0", found.pid, found.started),))
            runs.write_record(folder, record)
            with monkeypatch.context() as hangs:
                hangs.setattr(remains, "end", lambda record, **more: None)
                with pytest.raises(GraphError, match=f"the processes {process.pid} do not end"):
                    launcher.clean(folder)
            assert runs.read_record(folder) == record
            assert launcher.clean(folder)
        finally:
            process.kill()
    assert not folder.record.exists()


def test_what_a_killed_supervisor_left_gets_as_long_as_it_would_have_given(programs: Path) -> None:
    graph = small(args=("--shutdown-timeout=100",))
    with started(graph, programs) as (cluster, _):
        record = runs.read_record(cluster.folder)
        assert record is not None
        of = {each.name: each.grace_s for each in record.processes}
        assert (of["decode-0"], of["prefill-0"], record.grace_s) == (115, 45, 115)


def test_what_does_not_end_within_its_grace_is_killed(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"deaf\n"
        found = proc_tree.identify(process.pid)
        assert found is not None
        remains.end(Record("0123", runs.boot_id(), (runs.Started("x", found.pid, found.started, 0.2),)))
        assert process.wait(WAIT_S) == -signal.SIGKILL


def test_a_graph_ends_with_whoever_started_it(programs: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from vllm_pd.graph import launcher\n"
        "from vllm_pd.graph.model import Frontend, Worker\n"
        "cluster = launcher.start(Frontend(port=0).link(Worker()).graph('g', model='m'), programs=Path(sys.argv[1]))\n"
        "print('started', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(programs)], stdout=subprocess.PIPE) as starter:
        try:
            assert starter.stdout is not None
            assert starter.stdout.readline() == b"started\n"
            folder = runs.folder_of("g", os.environ)
            status = launcher.wait_until_up(folder)
        finally:
            starter.kill()
    until(lambda: not folder.is_locked(), "it ends")
    assert not any(is_listening(port) for port in ports(status))
    # In order, not by the guard.
    assert "ended; left behind: nothing" in folder.log("supervisor").read_text()


def test_the_commands_show_scale_and_end_a_graph_that_stays(
    programs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # What a user has of it: the file, and programs beside the Python that runs.
    with started(small("mine"), programs, stays=True) as (cluster, _):
        cluster.leave_alone()
        assert main(["status", "--json"]) == 0
        (shown,) = json.loads(capfd.readouterr().out)
        assert (shown["graph"], shown["state"]) == ("mine", "up")
        assert main(["status", "mine"]) == 0
        text = capfd.readouterr().out
        assert text.startswith("mine: up, for ")
        assert "decode-0    ready" in text
        assert main(["scale", "decode=2", "--wait"]) == 0
        assert "decode: 1 -> 2, 1 on the way." in capfd.readouterr().out
        assert main(["scale", "decode=1", "decod=2"]) == 1
        assert "did you mean 'decode'?); nothing was scaled." in capfd.readouterr().err
        assert main(["scale", "decode=1", "prefill=99"]) == 1
        assert "prefill may have 0 to 64 instances, not 99; nothing was scaled." in capfd.readouterr().err
        assert {c.name: c.wanted for c in cluster.status().components}["decode"] == 2
        assert main(["restart", "prefill"]) == 0
        assert main(["logs", "decode", "-n", "1"]) == 0
        assert capfd.readouterr().out.splitlines()[-2:] == ["decode-0 | vllm begins", "decode-1 | vllm begins"]
        assert main(["logs", "decod-1"]) == 1
        assert "mine has no such log (did you mean 'decode-1'?); there are: decode-0," in capfd.readouterr().err
        file = tmp_path / "mine.yaml"
        file.write_text("graph: mine\nmodel: m\ncomponents: {worker: {}}")
        assert main(["down", str(file)]) == 0
        assert "nothing left behind" in capfd.readouterr().out
        # Logs outlive the graph.
        assert main(["logs", "decode-0", "-n", "1"]) == 0
        assert capfd.readouterr().out == "vllm begins\n"
        assert main(["status"]) == 1


def test_commands_about_no_graph_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["down"], ["scale", "decode=1"], ["logs"], ["restart", "x"], ["status", "g"]):
        assert main(command) == 1
        assert "up" in capsys.readouterr().err
    assert main(["down", "--all"]) == 0
    assert "No graph is up." in capsys.readouterr().out


def test_ways_to_start_that_exclude_each_other_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(Path(__file__).parents[3] / "configs" / "agg.yaml")
    assert main(["up", config, "--output", "cluster.yaml"]) == 2
    assert "add --render kubernetes" in capsys.readouterr().err
    for both in (["--check", "--detach"], ["--check", "--render", "kubernetes"]):
        with pytest.raises(SystemExit):
            main(["up", config, *both])
        assert "not allowed with argument" in capsys.readouterr().err


def test_whoever_reads_only_the_beginning_sees_no_traceback() -> None:
    command = [sys.executable, "-m", "vllm_pd.cli", "config", "--role", "decode"]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_check_starts_nothing_and_shows_what_would_be(
    tmp_path: Path,
    run_dir: Path,
    programs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(
        "graph: g\nmodel: m\ncomponents:\n"
        "  frontend: {links: [router]}\n  router: {links: [worker]}\n  worker: {}\n"
        "  store: {url: 'redis://:${PASSWORD}@10.0.0.2:6379'}\n"
    )
    monkeypatch.setenv("PASSWORD", "hunter2")
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    free = f"frontend.port={free_port()}"
    assert main(["up", str(file), "--check", "--set", "worker.count=2", "--set", free]) == 0
    shown = capsys.readouterr().out
    assert "worker-1" in shown
    assert "hunter2" not in shown
    assert "was not checked against vLLM's options" in shown
    assert main(["up", str(file), "--check", "--json", "--set", free]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [p["process"] for p in plan["processes"]] == ["worker-0", "frontend-0"]
    assert not run_dir.exists()
    assert main(["up", str(file), "--check", "--set", "worker.cuont=2"]) == 2
    assert "did you mean 'count'?" in capsys.readouterr().err
    assert main(["up", str(file), "--check", "--set", free, "--set", "model=./nowhere"]) == 1
    assert "worker is to serve ./nowhere, which is not there" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["up", str(file), "--check", "--set", f"frontend.port={port}"]) == 1
    assert f"Port {port} of frontend-0 is taken" in capsys.readouterr().err
    (programs / "vllm").unlink()
    assert main(["up", str(file), "--check", "--set", free]) == 1
    assert "worker-0 needs the program" in capsys.readouterr().err


def test_of_several_graphs_one_that_does_not_end_keeps_the_others_from_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        runs.write_record(runs.folder_of(name, os.environ).make(), Record("0123", runs.boot_id()))

    def hangs(folder: RunFolder) -> bool:
        if folder.graph == "a":
            raise GraphError("Of the graph a the processes 7 do not end; they hang in the kernel.")
        return True

    monkeypatch.setattr(launcher, "clean", hangs)
    assert main(["down", "--all"]) == 1
    shown = capsys.readouterr()
    assert "they hang in the kernel" in shown.err
    assert "b: what its killed supervisor left was ended" in shown.out


def test_manifests_that_cannot_be_written_are_an_error_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path(__file__).parents[3] / "configs" / "agg.yaml"
    target = str(tmp_path / "no" / "cluster.yaml")
    assert main(["up", str(config), "--render", "kubernetes", "--output", target]) == 1
    assert f"{target} cannot be written (No such file or directory)" in capsys.readouterr().err


def test_a_folder_that_others_may_enter_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir(mode=0o755)
    folder = RunFolder(tmp_path / "g").make()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_worker_alone_needs_no_store(programs: Path) -> None:
    graph = Frontend(port=0).link(Worker()).graph("g", model="m", restart=RULE)
    with launcher.running(graph, programs=programs) as cluster:
        assert cluster.status().store == ""
