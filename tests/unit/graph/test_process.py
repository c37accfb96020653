"""ManagedProcess against real processes: however they behave, none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from vllm_pd.graph import proc_tree
from vllm_pd.graph.ports import free_port, is_listening
from vllm_pd.graph.proc_tree import ProcessId, identify, is_alive, send
from vllm_pd.graph.process import ManagedProcess, ProcessError, ProcessSpec

WAIT_S = 60.0


def python(tmp_path: Path, code: str, name: str = "worker") -> ManagedProcess:
    return ManagedProcess(ProcessSpec(name, [sys.executable, "-u", "-c", code], tmp_path / f"{name}.log"))


def prints(process: ManagedProcess, word: str) -> Callable[[], bool]:
    return lambda: any(line.startswith(word) for line in process.tail())


def child_pid(process: ManagedProcess) -> ProcessId:
    line = next(line for line in process.tail() if line.startswith("child"))
    found = identify(int(line.split()[1]))
    assert found is not None
    return found


CHILD = "import subprocess,sys,time; c=subprocess.Popen([sys.executable,'-c','import time; time.sleep(600)']{kw});"
WITH_CHILD = CHILD.format(kw="") + "print('child', c.pid);"
WITH_ESCAPED_CHILD = CHILD.format(kw=",start_new_session=True") + "print('child', c.pid);"


def test_a_url_that_answers_ends_the_wait_and_stop_ends_the_server(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with ManagedProcess(ProcessSpec("web", command, tmp_path / "web.log")) as process:
        process.wait_ready(f"http://127.0.0.1:{port}/", deadline_s=WAIT_S)
        assert is_listening(port)
    assert not process.is_running
    assert not is_listening(port)
    assert process.returncode == -signal.SIGTERM


def test_a_process_that_dies_early_fails_at_once_with_its_last_words(tmp_path: Path) -> None:
    process = python(tmp_path, "print('loading'); raise SystemExit('no memory left')")
    with process, pytest.raises(ProcessError) as caught:
        process.wait_ready(lambda: False, deadline_s=600)
    message = str(caught.value)
    assert "worker ended with status 1 before it was ready" in message
    assert "no memory left" in message
    assert str(tmp_path / "worker.log") in message


def test_the_first_exception_in_the_log_is_named_as_the_cause(tmp_path: Path) -> None:
    lines = ["Worker WARNING [y.py:2] a low limit can cause errors like `OSError: Too many open files`."]
    lines += ["Worker ERROR [x.py:1] ValueError: too little memory", *["noise"] * 30, "RuntimeError: start failed"]
    process = python(tmp_path, f"import sys; print(*{lines!r}, sep='\\n'); sys.exit(1)")
    cause = r"before it was ready \(ValueError: too little memory\); its log"
    with process, pytest.raises(ProcessError, match=cause):
        process.wait_ready(lambda: False, deadline_s=600)


def test_a_process_that_is_never_ready_fails_at_the_deadline(tmp_path: Path) -> None:
    waits: list[float] = []
    with python(tmp_path, "print('still loading', flush=True); import time; time.sleep(600)") as process:
        process.wait_ready(prints(process, "still"), deadline_s=WAIT_S)
        with pytest.raises(ProcessError, match=r"was not ready after 0 s; its log is .* ends with\n  still loading"):
            process.wait_ready(lambda: False, deadline_s=0.3, progress=waits.append)
    assert waits == sorted(waits)
    assert waits
    assert not process.is_running


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    process = ManagedProcess(ProcessSpec("worker", ["/nonexistent/program"], tmp_path / "log"))
    with pytest.raises(ProcessError, match=r"worker cannot be started: /nonexistent/program: No such file"):
        process.start()
    assert process.stop() is None


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(600)"
    with python(tmp_path, code) as process:
        process.wait_ready(prints(process, "deaf"), deadline_s=WAIT_S)
        assert process.stop(grace_s=0.2) == -signal.SIGKILL
    assert not process.left_processes()


def test_a_process_that_ends_itself_on_sigterm_keeps_its_exit_status(tmp_path: Path) -> None:
    code = "import signal,sys,time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('up'); time.sleep(600)"
    with python(tmp_path, code) as process:
        process.wait_ready(prints(process, "up"), deadline_s=WAIT_S)
        assert process.stop(grace_s=WAIT_S) == 7
        assert process.stop(grace_s=WAIT_S) == 7


@pytest.mark.parametrize("code", [WITH_CHILD, WITH_ESCAPED_CHILD], ids=["same session", "own session"])
def test_children_end_with_their_parent(tmp_path: Path, code: str) -> None:
    with python(tmp_path, code + "time.sleep(600)") as process:
        process.wait_ready(prints(process, "child"), deadline_s=WAIT_S)
        child = child_pid(process)
        assert is_alive(child)
    assert not is_alive(child)
    assert not process.left_processes()


def test_children_of_a_process_that_crashed_end_too(tmp_path: Path) -> None:
    with python(tmp_path, WITH_CHILD + "time.sleep(600)") as process:
        process.wait_ready(prints(process, "child"), deadline_s=WAIT_S)
        child = child_pid(process)
        os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        while process.is_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_alive(child)
        process.stop()
    assert not is_alive(child)


def test_a_paused_process_is_ended(tmp_path: Path) -> None:
    with python(tmp_path, "print('up'); import time; time.sleep(600)") as process:
        process.wait_ready(prints(process, "up"), deadline_s=WAIT_S)
        os.kill(process.pid, signal.SIGSTOP)
        assert process.stop(grace_s=WAIT_S) == -signal.SIGTERM


def test_an_exception_in_the_progress_callback_leaves_no_process(tmp_path: Path) -> None:
    def interrupt(waited: float) -> None:
        raise KeyboardInterrupt

    process = python(tmp_path, WITH_CHILD + "time.sleep(600)")
    with pytest.raises(KeyboardInterrupt), process:
        process.wait_ready(lambda: False, deadline_s=WAIT_S, progress=interrupt)
    assert not process.is_running
    assert not process.left_processes()


def test_a_second_start_appends_to_the_log_and_the_tail_shows_the_new_run_only(tmp_path: Path) -> None:
    process = python(tmp_path, "import os,time; print('run', os.getpid()); time.sleep(600)")
    pids = []
    for _ in range(2):
        process.start()
        process.wait_ready(prints(process, "run"), deadline_s=WAIT_S)
        pids.append(process.pid)
        assert process.tail() == [f"run {process.pid}"]
        process.stop()
    assert (tmp_path / "worker.log").read_text().splitlines() == [f"run {pid}" for pid in pids]


def test_shared_memory_that_a_killed_process_leaves_is_known(tmp_path: Path) -> None:
    name = f"vllm_pd_test_{os.getpid()}"
    code = (
        "import time; from multiprocessing import shared_memory as s, resource_tracker as r;"
        f"m=s.SharedMemory('{name}',create=True,size=4096); r.unregister(m._name,'shared_memory');"
        "print('mapped'); time.sleep(600)"
    )
    with python(tmp_path, code) as process:
        process.wait_ready(prints(process, "mapped"), deadline_s=WAIT_S)
        process.kill()
        assert process.left_shared_memory() == {f"/dev/shm/{name}"}
        left = shared_memory.SharedMemory(name)
        left.close()
        left.unlink()
        assert not process.left_shared_memory()


def test_shared_memory_of_another_program_is_not_what_a_process_left(tmp_path: Path) -> None:
    theirs = shared_memory.SharedMemory(create=True, size=4096)
    # Longer than two clock ticks.
    time.sleep(0.2)
    code = (
        "import time; from multiprocessing import shared_memory as s, resource_tracker as r;"
        f"m=s.SharedMemory('{theirs.name}'); r.unregister(m._name,'shared_memory'); print('mapped'); time.sleep(600)"
    )
    try:
        with python(tmp_path, code) as process:
            process.wait_ready(prints(process, "mapped"), deadline_s=WAIT_S)
            process.kill()
            assert not process.left_shared_memory()
            # Nobody uses it now, and still it is not ours: it was there before the process was.
            theirs.close()
            assert not process.left_shared_memory()
    finally:
        theirs.unlink()


def test_a_file_in_dev_shm_that_was_there_before_survives_the_process_that_read_it(tmp_path: Path) -> None:
    """A model that somebody keeps in memory, say."""
    model = Path(f"/dev/shm/vllm_pd_test_model_{os.getpid()}")
    model.write_bytes(bytes(4096))
    time.sleep(0.2)
    try:
        with python(tmp_path, f"import time; f=open({str(model)!r}); print('reads'); time.sleep(600)") as process:
            process.wait_ready(prints(process, "reads"), deadline_s=WAIT_S)
            assert str(model) in proc_tree.shared_memory([process.leader])  # type: ignore[list-item]
            process.kill()
            assert not process.left_shared_memory()
    finally:
        model.unlink()


def test_a_semaphore_is_known_although_it_was_made_under_another_name(tmp_path: Path) -> None:
    code = "import multiprocessing as m, time; x = m.get_context('spawn').Lock(); print('made'); time.sleep(600)"
    with python(tmp_path, code) as process:
        process.wait_ready(prints(process, "made"), deadline_s=WAIT_S)
        (path,) = process.left_shared_memory()
        assert path.startswith("/dev/shm/sem.")
        process.stop(grace_s=0)
        for left in process.left_shared_memory():
            Path(left).unlink()


def test_a_stranger_with_a_name_that_is_no_text_hides_nobody(tmp_path: Path) -> None:
    program = tmp_path / os.fsdecode(b"\xff\xfe")
    program.symlink_to("/bin/sleep")
    stranger = subprocess.Popen([program, "600"])
    try:
        with python(tmp_path, WITH_CHILD + "time.sleep(600)") as process:
            process.wait_ready(prints(process, "child"), deadline_s=WAIT_S)
            assert len(proc_tree.everyone()) > 2
            assert identify(stranger.pid) is not None
        assert not process.left_processes()
    finally:
        stranger.kill()
        stranger.wait(WAIT_S)


def test_one_that_may_not_be_signalled_does_not_save_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = identify(os.getpid())
    assert mine is not None
    told = []

    def refuse(handle: int, number: int) -> None:
        told.append(handle)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    send([mine, mine], signal.SIGTERM)
    assert len(told) == 2


def test_a_signal_for_a_reused_pid_hits_nobody() -> None:
    mine = identify(os.getpid())
    assert mine is not None
    stranger = ProcessId(mine.pid, mine.started - 1)
    send([stranger], signal.SIGKILL)
    assert not is_alive(stranger)
    assert is_alive(mine)


def test_a_process_knows_for_how_long_it_has_run() -> None:
    code = "import time; time.sleep(0.6); from vllm_pd.graph.proc_tree import own_age_s; print(own_age_s())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=WAIT_S)
    # Starts are known to the clock tick.
    assert 0.55 <= float(done.stdout) <= time.monotonic() - began + 0.05
