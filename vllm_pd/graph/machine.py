"""What this machine offers to workers: GPUs, or processor cores when it has none."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

_QUERY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources that workers are spread over.

    Attributes:
        cores: ids of the cores that this process may use; never empty.
        gpus: values for CUDA_VISIBLE_DEVICES, one per GPU; empty on a CPU machine.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()

    @property
    def has_gpu(self) -> bool:
        return bool(self.gpus)


def detect() -> Machine:
    """Look at this machine. A CUDA_VISIBLE_DEVICES in the environment is respected."""
    return Machine(cores=tuple(sorted(os.sched_getaffinity(0))), gpus=_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))


def _gpus(visible: str | None) -> tuple[str, ...]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if done.returncode != 0:
        return ()
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    return tuple(done.stdout.split())
