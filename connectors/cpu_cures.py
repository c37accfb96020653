"""Habits of NIXL and vLLM that make a small CPU machine slow, undone there and only there.

1. NIXL's Python API fixes the delay of its progress thread to 0 us, which burns a whole core per worker even when idle.
   50 us drop that to about a percent, and a hand-off of megabytes takes no longer.
2. vLLM's NIXL worker pins the main thread, and with it all it starts later, to the last core of each NUMA node
   (`nixl/base_worker.py`); with one or two cores the model then shares that core with its own OpenMP threads.
3. The main thread is bound to the model's first core by OpenMP, and the threads that NIXL starts inherit that: they
   would interrupt the model thousands of times a second. They get the cores that the engine process may use.
4. For a second after each message, an engine and its worker poll the memory they share for the next one. That takes
   microseconds off a step, and a core for each process that has next to nothing to do: of two cores with two busy
   servers, most of the time goes there. They wait to be woken instead, which vLLM's reader does anyway when it is idle.

On GPUs none hurts (the threads poll the network, the model runs elsewhere), so nothing is changed there.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_pd import vllm_compat as compat

PROGRESS_DELAY_US = 50

_RECENT_S = 1.0
_RECHECK_MS = 1
_MARK = "_vllm_pd_wrapped"


class _PatientBindings:
    """NIXL's bindings, except that an agent whose progress thread would spin gets a delay."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        if config.pthrDelay == 0:
            config.pthrDelay = PROGRESS_DELAY_US
        return self._bindings.nixlAgent(name, config)


@contextmanager
def calm_nixl() -> Iterator[None]:
    """Within the block, NIXL agents and vLLM's NIXL workers are created without these habits (CPU platform only)."""
    if not compat.current_platform.is_cpu():
        yield
        return
    api = sys.modules[compat.NixlWrapper.__module__]
    platform = compat.CpuPlatform
    bindings, discover = api.nixlBind, platform.__dict__["discover_numa_topology"]
    api.nixlBind = _PatientBindings(bindings)  # type: ignore[attr-defined]
    platform.discover_numa_topology = classmethod(lambda cls: [])
    cores = os.sched_getaffinity(0)
    try:
        # Our parent is the engine process, which OpenMP has not bound.
        os.sched_setaffinity(0, cores | os.sched_getaffinity(os.getppid()))
        yield
    finally:
        os.sched_setaffinity(0, cores)
        api.nixlBind = bindings  # type: ignore[attr-defined]
        platform.discover_numa_topology = discover


def calm_queues() -> None:
    """From now on, queues between this process and others of its server wait to be woken (CPU platform only).

    Also those that exist already. Idempotent.
    """
    condition = compat.SpinCondition
    if not compat.current_platform.is_cpu() or getattr(condition.wait, _MARK, False):
        return
    wait = condition.wait

    @functools.wraps(wait)
    def wait_to_be_woken(self: Any, timeout_ms: int | None = None) -> None:
        if time.monotonic() <= self.last_read + _RECENT_S:
            # ZeroMQ drops the second of two wake-ups within about a millisecond: it must not be waited for.
            timeout_ms = _RECHECK_MS if timeout_ms is None else min(timeout_ms, _RECHECK_MS)
        # vLLM polls as long as its last message is younger than this.
        self.busy_loop_s = -1.0
        wait(self, timeout_ms)

    setattr(wait_to_be_woken, _MARK, True)
    condition.wait = wait_to_be_woken
