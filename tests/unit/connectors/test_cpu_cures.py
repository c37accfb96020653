"""The cures reach NIXL's real bindings on the CPU platform, end with the block, and touch nothing elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nixl")
pytest.importorskip("vllm")

from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from vllm_pd import vllm_compat as compat
from vllm_pd.connectors import cpu_cures
from vllm_pd.connectors.cpu_cures import PROGRESS_DELAY_US, calm_nixl

pytestmark = pytest.mark.vllm


@pytest.fixture
def api() -> Any:
    return sys.modules[compat.NixlWrapper.__module__]


@pytest.fixture
def on_cpu() -> None:
    if not compat.current_platform.is_cpu():
        pytest.skip("this vLLM is not built for CPUs")


def test_an_agent_made_inside_has_a_patient_progress_thread(
    on_cpu: None, api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, delays = api.nixlBind, []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def nixlAgent(self, name: str, config: Any) -> Any:
            delays.append(config.pthrDelay)
            return real.nixlAgent(name, config)

    monkeypatch.setattr(api, "nixlBind", Recording())
    with calm_nixl():
        compat.NixlWrapper("inside", api.nixl_agent_config(backends=[]))
    compat.NixlWrapper("outside", api.nixl_agent_config(backends=[]))
    assert delays == [PROGRESS_DELAY_US, 0]


def test_a_delay_that_somebody_chose_is_kept() -> None:
    seen = []
    bindings = cpu_cures._PatientBindings(SimpleNamespace(nixlAgent=lambda name, config: seen.append(config.pthrDelay)))
    bindings.nixlAgent("a", SimpleNamespace(pthrDelay=7))
    assert seen == [7]


def test_no_core_is_offered_for_pinning_inside_and_all_is_undone_even_after_an_error(on_cpu: None, api: Any) -> None:
    platform = compat.CpuPlatform
    before = api.nixlBind, platform.__dict__["discover_numa_topology"]
    with pytest.raises(RuntimeError, match="inside"), calm_nixl():
        assert platform.discover_numa_topology() == []
        assert api.nixlBind is not before[0]
        raise RuntimeError("inside")
    assert (api.nixlBind, platform.__dict__["discover_numa_topology"]) == before


def test_on_an_accelerator_nothing_is_touched(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(compat), "current_platform", SimpleNamespace(is_cpu=lambda: False))
    before = api.nixlBind, compat.CpuPlatform.__dict__["discover_numa_topology"]
    with calm_nixl():
        assert (api.nixlBind, compat.CpuPlatform.__dict__["discover_numa_topology"]) == before


def test_threads_started_within_get_the_cores_of_the_engine_process_and_the_main_thread_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything = os.sched_getaffinity(0)
    if len(everything) < 2:
        pytest.skip("needs two cores")
    own = {min(everything)}
    real = os.sched_getaffinity
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: everything if pid == os.getppid() else real(pid))
    os.sched_setaffinity(0, own)
    seen: list[set[int]] = []
    try:
        with calm_nixl():
            thread = threading.Thread(target=lambda: seen.append(real(0)))
            thread.start()
            thread.join()
        assert seen == [everything]
        assert real(0) == own
    finally:
        os.sched_setaffinity(0, everything)


def test_a_reader_of_shared_memory_does_not_poll_and_misses_nothing(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat.SpinCondition, "wait", compat.SpinCondition.wait)
    cpu_cures.calm_queues()
    wait = compat.SpinCondition.wait
    cpu_cures.calm_queues()
    assert compat.SpinCondition.wait is wait
    writer = MessageQueue(n_reader=1, n_local_reader=1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), rank=0)

    def write() -> None:
        writer.wait_until_ready()
        for i in range(2000):
            writer.enqueue(i)
            # Shorter and longer than what it takes ZeroMQ to notice that a wake-up was taken.
            time.sleep(i % 4 * 0.0004)

    polls: list[int] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: polls.append(threading.get_ident()))
    thread = threading.Thread(target=write)
    thread.start()
    reader.wait_until_ready()
    # A wake-up that is missed would let a message wait for as long as this.
    assert [reader.dequeue(timeout=5) for _ in range(2000)] == list(range(2000))
    thread.join()
    # The writer does, while its ring is full.
    assert threading.get_ident() not in polls
    writer.shutdown()
    reader.shutdown()
