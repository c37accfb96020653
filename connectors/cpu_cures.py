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

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_pd import vllm_compat as compat

PROGRESS_DELAY_US = 50


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
    if compat.current_platform.is_cpu():
        # A reader polls while its last message is younger than a second: it no longer knows of any.
        compat.SpinCondition.record_read = _forget_read


def _forget_read(self: Any) -> None:
    self.last_read = 0.0
