"""The supervisor with real processes: what comes up in what order, what happens to what fails, and what is left."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.unit.graph.programs import write_programs
from vllm_pd.errors import GraphError, SettingsError
from vllm_pd.graph import runs
from vllm_pd.graph.check import check
from vllm_pd.graph.machine import Machine
from vllm_pd.graph.model import Decode, Frontend, Graph, Limits, Planner, Prefill, RestartRule, Router, Worker
from vllm_pd.graph.ports import is_listening
from vllm_pd.graph.runs import RunFolder, read_record
from vllm_pd.graph.status import GraphState, GraphStatus, Phase
from vllm_pd.graph.supervisor import Supervisor

CPU = Machine(cores=(0, 1))
WAIT_S = 200.0
SOON = RestartRule(tries=2, first_delay_s=0.01, longest_delay_s=0.02)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    return write_programs(tmp_path / "programs")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").make()


def disagg(*, decode: Decode | None = None, prefill: Prefill | None = None, rule: RestartRule = SOON) -> Graph:
    chain = Frontend(port=0).link(Router()).link(decode or Decode(1)).link(prefill or Prefill(1))
    return check(chain.graph("g", model="m", restart=rule))


@asynccontextmanager
async def supervised(
    graph: Graph, folder: RunFolder, programs: Path, machine: Machine = CPU, environ: dict[str, str] | None = None
) -> AsyncIterator[Supervisor]:
    env = {"PATH": os.environ["PATH"]} | (environ or {})
    supervisor = Supervisor(graph, machine, folder, programs=programs, environ=env, run=secrets.token_hex(8))
    await supervisor.start()
    try:
        yield supervisor
    finally:
        left = await supervisor.stop(now=True)
        assert not left
    record = read_record(folder)
    assert record is not None
    assert not record.processes


async def until(supervisor: Supervisor, holds: Callable[[GraphStatus], bool]) -> GraphStatus:
    deadline = time.monotonic() + WAIT_S
    while not holds(status := supervisor.status()):
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.02)
    return status


async def until_up(supervisor: Supervisor) -> GraphStatus:
    return await until(supervisor, lambda s: s.state is GraphState.UP)


def proc(status: GraphStatus, name: str, file: str) -> list[str]:
    """What /proc says of one process: its `cmdline` or `environ`; nothing when it is gone."""
    found = status.instance(name)
    assert found is not None
    path = Path(f"/proc/{found.pid}/{file}")
    return path.read_text().split("\0")[:-1] if path.exists() else []


def phase(status: GraphStatus, name: str) -> Phase:
    found = status.instance(name)
    assert found is not None, status
    return found.phase


async def test_everything_comes_up_after_what_it_needs_and_goes_without_a_trace(
    folder: RunFolder, programs: Path
) -> None:
    graph = disagg(decode=Decode(2))
    async with supervised(graph, folder, programs) as supervisor:
        status = await until_up(supervisor)
        assert [i.name for i in status.instances] == ["store", "decode-0", "decode-1", "prefill-0", "frontend-0"]
        ready = [event.text.split()[0] for event in status.events]
        assert ready[0] == "store"
        assert ready.index("frontend-0") > max(ready.index("decode-0"), ready.index("decode-1"))
        ports = [int(i.url.rpartition(":")[2]) for i in status.instances]
        assert all(is_listening(port) for port in ports)
        assert status.url == status.instances[-1].url
        record = read_record(folder)
        assert record is not None
        assert {started.name for started in record.processes} == {i.name for i in status.instances}
        assert sorted(log.stem for log in folder.logs.iterdir()) == sorted(i.name for i in status.instances)
    assert not any(is_listening(port) for port in ports)


async def test_what_dies_at_once_is_tried_again_and_then_given_up_with_its_reason(
    folder: RunFolder, programs: Path
) -> None:
    graph = disagg(decode=Decode(1, args=("--crash",)))
    async with supervised(graph, folder, programs) as supervisor:
        status = await until(supervisor, lambda s: phase(s, "decode-0") is Phase.GIVEN_UP)
        given_up = status.instance("decode-0")
        assert given_up is not None
        assert (given_up.failures, given_up.restarts) == (3, 2)
        assert given_up.detail == "ended with status 1 (ValueError: this model does not fit)"
        assert given_up.log_end[-1] == "ValueError: this model does not fit"
        assert [e.text for e in status.events if "is given up after it failed 3 times in a row" in e.text]
        # Nobody waits for ever without saying for what.
        status = await until(
            supervisor,
            lambda s: s.instance("frontend-0").detail == "for decode, which does not come up",  # type: ignore[union-attr]
        )
        assert [i.name for i in status.instances if i.is_stuck] == ["frontend-0"]
        await until(supervisor, lambda s: phase(s, "prefill-0") is Phase.READY)
        assert status.state is GraphState.DEGRADED


async def test_one_that_was_given_up_gets_a_new_chance_when_asked(folder: RunFolder, programs: Path) -> None:
    graph = disagg(prefill=Prefill(1, args=("--crash",)))
    async with supervised(graph, folder, programs) as supervisor:
        await until(supervisor, lambda s: phase(s, "prefill-0") is Phase.GIVEN_UP)
        # What was wrong is put right.
        program = programs / "vllm"
        program.write_text(program.read_text().replace('"--crash" in args', "False"))
        assert supervisor.restart("prefill") == "prefill-0: started anew."
        status = await until_up(supervisor)
        assert status.instance("prefill-0").failures == 0  # type: ignore[union-attr]


async def test_what_is_killed_starts_again_at_its_address_and_nothing_else_does(
    folder: RunFolder, programs: Path
) -> None:
    graph = disagg(decode=Decode(1, args=("--child",)))
    async with supervised(graph, folder, programs) as supervisor:
        before = {i.name: i for i in (await until_up(supervisor)).instances}
        os.kill(before["decode-0"].pid, signal.SIGKILL)
        await until(supervisor, lambda s: s.instance("decode-0").restarts == 1)  # type: ignore[union-attr]
        after = {i.name: i for i in (await until_up(supervisor)).instances}
        assert after["decode-0"].url == before["decode-0"].url
        assert after["decode-0"].pid != before["decode-0"].pid
        assert {n: i.pid for n, i in after.items() if n != "decode-0"} == {
            n: i.pid for n, i in before.items() if n != "decode-0"
        }
        killed = [event.text for event in supervisor.status().events if "SIGKILL" in event.text]
        assert killed == ["decode-0 was ended by SIGKILL; it starts again in 0 s (failure 1 in a row)"]


async def test_a_worker_whose_port_was_taken_while_it_was_down_gets_another(folder: RunFolder, programs: Path) -> None:
    rule = RestartRule(tries=5, first_delay_s=600.0, longest_delay_s=600.0)
    async with supervised(disagg(rule=rule), folder, programs) as supervisor:
        before = (await until_up(supervisor)).instance("decode-0")
        assert before is not None
        os.kill(before.pid, signal.SIGKILL)
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            deadline = time.monotonic() + WAIT_S
            while True:
                try:
                    thief.bind(("127.0.0.1", int(before.url.rpartition(":")[2])))
                    thief.listen()
                    break
                except OSError:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.01)
            await until(supervisor, lambda s: phase(s, "decode-0") is Phase.BACKOFF)
            supervisor.restart("decode-0")
            await until(supervisor, lambda s: s.instance("decode-0").restarts == 1)  # type: ignore[union-attr]
            after = (await until_up(supervisor)).instance("decode-0")
        assert after is not None
        assert after.url != before.url


async def test_scaling_adds_the_lowest_free_numbers_and_ends_the_newest(folder: RunFolder, programs: Path) -> None:
    graph = disagg(decode=Decode(2, limits=Limits(1, 3)))
    async with supervised(graph, folder, programs) as supervisor:
        await until_up(supervisor)
        assert supervisor.scale("decode", 3) == "decode: 2 -> 3, 1 on the way."
        await until(supervisor, lambda s: s.state is GraphState.UP and len(s.instances) == 6)
        supervisor.scale("decode", 1)
        status = await until(supervisor, lambda s: len(s.instances) == 4)
        assert status.instance("decode-0") is not None
        with pytest.raises(GraphError, match="decode may have 1 to 3 instances, not 4"):
            supervisor.scale("decode", 4)
        with pytest.raises(GraphError, match=r"There is no component 'decod' \(did you mean 'decode'\?\)"):
            supervisor.scale("decod", 1)
        with pytest.raises(GraphError, match="frontend is a frontend; only workers can be scaled"):
            supervisor.scale("frontend", 2)


async def test_a_worker_is_removed_by_its_address_and_its_component_then_wants_one_less(
    folder: RunFolder, programs: Path
) -> None:
    graph = disagg(decode=Decode(2, limits=Limits(1, 4)))
    async with supervised(graph, folder, programs) as supervisor:
        first = (await until_up(supervisor)).instance("decode-0")
        assert first is not None
        address = first.url.removeprefix("http://")
        assert supervisor.remove(address) == "decode-0 finishes what it has and ends."
        status = await until(supervisor, lambda s: s.instance("decode-0") is None)
        assert [c.wanted for c in status.components if c.name == "decode"] == [1]
        with pytest.raises(GraphError, match="There is no worker"):
            supervisor.remove(address)
        with pytest.raises(GraphError, match="decode may not have less than 1"):
            supervisor.remove("decode-1")


async def test_those_given_up_are_never_so_many_that_fewer_stay_than_may(folder: RunFolder, programs: Path) -> None:
    graph = disagg(decode=Decode(2, args=("--never-ready",), limits=Limits(1, 4)))
    async with supervised(graph, folder, programs) as supervisor:
        await until(supervisor, lambda s: phase(s, "decode-1") is Phase.STARTING)
        assert supervisor.give_up("decode", 5) == "decode: decode-1 given up."
        assert supervisor.give_up("decode", 5) == "decode: none given up."


async def test_nothing_is_started_anew_while_the_graph_is_being_ended(folder: RunFolder, programs: Path) -> None:
    environ = {"PATH": os.environ["PATH"]}
    supervisor = Supervisor(disagg(), CPU, folder, programs=programs, environ=environ, run=secrets.token_hex(8))
    await supervisor.start()
    ending = asyncio.create_task(supervisor.stop(now=True))
    await asyncio.sleep(0)
    with pytest.raises(GraphError, match="The graph g is being ended"):
        supervisor.restart("prefill")
    with pytest.raises(GraphError, match="The graph g is being ended"):
        supervisor.scale("prefill", 2)
    assert not await ending


async def test_what_ended_starts_again_although_the_record_cannot_be_written(
    folder: RunFolder, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(disagg(), folder, programs) as supervisor:
        before = (await until_up(supervisor)).instance("decode-0")
        assert before is not None
        write, failed = runs.write_record, []

        def full_once(folder: RunFolder, record: runs.Record) -> None:
            if not failed:
                failed.append(record)
                raise OSError(28, "No space left on device")
            write(folder, record)

        monkeypatch.setattr(runs, "write_record", full_once)
        os.kill(before.pid, signal.SIGKILL)
        await until(supervisor, lambda s: s.instance("decode-0").restarts == 1)  # type: ignore[union-attr]
        await until_up(supervisor)
        assert failed


async def test_gpus_are_given_away_once_and_come_back(folder: RunFolder, programs: Path) -> None:
    machine = Machine(cores=(0,), gpus=("4", "5", "6"))
    graph = disagg(decode=Decode(1, gpus=1), prefill=Prefill(1, gpus=1))
    async with supervised(graph, folder, programs, machine) as supervisor:
        status = await until_up(supervisor)
        assert [i.place for i in status.instances if i.place] == ["GPU 4", "GPU 5"]
        supervisor.scale("decode", 2)
        with pytest.raises(GraphError, match=r"decode-2 has no place on this machine: it wants 1 GPU\(s\), and 0 of 3"):
            supervisor.scale("decode", 3)
        await until_up(supervisor)
        supervisor.scale("decode", 1)
        await until(supervisor, lambda s: s.instance("decode-1") is None)
        supervisor.scale("prefill", 2)
        status = await until_up(supervisor)
        assert status.instance("prefill-1").place == "GPU 6"  # type: ignore[union-attr]


async def test_those_that_share_a_gpu_start_one_after_the_other(folder: RunFolder, programs: Path) -> None:
    hold = folder.path / "hold"
    hold.touch()
    machine = Machine(cores=(0,), gpus=("0",))
    graph = disagg(decode=Decode(2, gpus=0.3, args=(f"--hold={hold}",)), prefill=Prefill(1, gpus=0.3))
    async with supervised(graph, folder, programs, machine) as supervisor:
        status = await until(supervisor, lambda s: phase(s, "decode-0") is Phase.STARTING)
        second = await until(supervisor, lambda s: "its turn" in s.instance("decode-1").detail)  # type: ignore[union-attr]
        assert phase(second, "decode-1") is Phase.WAITING
        hold.unlink()
        status = await until_up(supervisor)
        assert status.instance("decode-1").place == "GPU 0 (30%)"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (Machine((0,), ("0",)), r"prefill-0 has no place on this machine: it wants 1 GPU\(s\), and 0 of 1 are free"),
        (Machine((0,), ("0", "1")), r"prefill-0 has no place on this machine: it wants 1 GPU\(s\), and 0 of 2"),
    ],
)
async def test_a_machine_that_is_too_small_is_refused_before_anything_starts(
    folder: RunFolder, programs: Path, machine: Machine, message: str
) -> None:
    graph = disagg(decode=Decode(len(machine.gpus)))
    supervisor = Supervisor(graph, machine, folder, programs=programs, environ={}, run="0123")
    with pytest.raises(GraphError, match=message):
        await supervisor.start()
    assert not list(folder.logs.iterdir())


async def test_a_port_that_is_taken_is_said_before_anything_starts(folder: RunFolder, programs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        graph = check(Frontend(port=port).link(Worker(1)).graph("g", model="m"))
        supervisor = Supervisor(graph, CPU, folder, programs=programs, environ={}, run="0123")
        with pytest.raises(GraphError, match=rf"Port {port} of frontend-0 is taken; .*--set frontend\.port=NUMBER"):
            await supervisor.start()
    assert not list(folder.logs.iterdir())


async def test_a_model_that_is_not_there_is_said_before_anything_starts(folder: RunFolder, programs: Path) -> None:
    graph = check(Frontend(port=0).link(Worker(1)).graph("g", model=str(folder.path / "no" / "model")))
    supervisor = Supervisor(graph, CPU, folder, programs=programs, environ={}, run="0123")
    with pytest.raises(GraphError, match=r"worker is to serve .*/no/model, which is not there"):
        await supervisor.start()
    assert not list(folder.logs.iterdir())


async def test_a_missing_program_or_secret_is_said_before_anything_starts(folder: RunFolder, programs: Path) -> None:
    (programs / "vllm").unlink()
    graph = check(Frontend(port=0).link(Worker(1)).graph("g", model="m"))
    supervisor = Supervisor(graph, CPU, folder, programs=programs, environ={}, run="0123")
    with pytest.raises(GraphError, match=r"worker-0 needs the program .*/vllm, which is not there; install vLLM"):
        await supervisor.start()
    graph = check(Frontend(port=0).link(Worker(1, secrets=("HF_TOKEN",))).graph("g", model="m"))
    supervisor = Supervisor(graph, CPU, folder, programs=programs, environ={}, run="0123")
    with pytest.raises(SettingsError, match="worker needs the variable HF_TOKEN, which is not set"):
        await supervisor.start()


async def test_without_a_store_the_frontend_is_told_its_workers_and_scaling_is_refused(
    folder: RunFolder, programs: Path
) -> None:
    graph = check(Frontend(port=0).link(Worker(2)).graph("g", model="m"))
    async with supervised(graph, folder, programs) as supervisor:
        status = await until_up(supervisor)
        urls = [i.url for i in status.instances if i.component == "worker"]
        command = proc(status, "frontend-0", "cmdline")
        assert [f"{url}=both" for url in urls] == [c for c in command if c.endswith("=both")]
        with pytest.raises(GraphError, match="The graph has no store"):
            supervisor.scale("worker", 3)


async def test_a_planner_runs_beside_and_finds_its_supervisor(folder: RunFolder, programs: Path) -> None:
    chain = Frontend(port=0).link(Router()).link(Decode(1)).link(Prefill(1)).beside(Planner())
    async with supervised(check(chain.graph("g", model="m")), folder, programs) as supervisor:
        status = await until_up(supervisor)
        command = proc(status, "planner", "cmdline")
        assert command[2:] == [str(programs / "vllm-pd"), "planner", "run", "--actuator", "processes"]
        environment = proc(status, "planner", "environ")
        assert f"PD_GRAPH_CONTROL={folder.path}" in environment
        assert f"VLLM_PD_STORE={status.store}" in environment


async def test_a_deaf_process_does_not_outlive_the_end(folder: RunFolder, programs: Path) -> None:
    graph = check(Frontend(port=0).link(Worker(1, args=("--deaf", "--child"))).graph("g", model="m"))
    async with supervised(graph, folder, programs) as supervisor:
        status = await until_up(supervisor)
        assert proc(status, "worker-0", "cmdline")
    assert not proc(status, "worker-0", "cmdline")


async def test_one_that_is_never_ready_fails_at_its_deadline(folder: RunFolder, programs: Path) -> None:
    worker = Worker(1, args=("--never-ready",), ready_s=4.0)
    graph = check(Frontend(port=0).link(worker).graph("g", model="m", restart=RestartRule(tries=0)))
    async with supervised(graph, folder, programs) as supervisor:
        status = await until(supervisor, lambda s: phase(s, "worker-0") is Phase.GIVEN_UP)
        assert status.instance("worker-0").detail == "was not ready after 4 s"  # type: ignore[union-attr]
        assert status.instance("worker-0").log_end[-1] == "vllm begins"  # type: ignore[union-attr]
