"""What this machine offers to workers: GPUs, or processor cores when it has none; and who gets what of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from vllm_pd.errors import GraphError

_QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
_QUERY_TIMEOUT_S = 60.0
_MOST_SAID = 300
_NONE = ("", "-1")
"""In CUDA_VISIBLE_DEVICES."""
_CPUINFO = Path("/proc/cpuinfo")
_SHARED_GPU_FRACTION = 0.8
# Fractions such as a third do not add up exactly.
_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources that workers are spread over.

    Attributes:
        cores: ids of the cores that this process may use; never empty.
        gpus: values for CUDA_VISIBLE_DEVICES, one per GPU; empty on a CPU machine.
        has_bfloat16: whether its cores compute bfloat16 about as fast as float32.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    has_bfloat16: bool = True

    @property
    def has_gpu(self) -> bool:
        return bool(self.gpus)

    def __str__(self) -> str:
        return f"{len(self.gpus)} GPU(s)" if self.has_gpu else f"{len(self.cores)} CPU core(s), no GPU"


@dataclass(frozen=True, slots=True)
class Place:
    """What part of a machine one worker gets: GPUs, or cores where there are none.

    Attributes:
        share: of its GPU, when others use it too; 1 has it alone.
        dtype: what to compute in, where a model's own type would be far too slow; empty leaves it to vLLM.
    """

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    share: float = 1.0
    dtype: str = ""

    @property
    def memory_fraction(self) -> float | None:
        """What vLLM may take of a shared GPU's memory; None leaves it to vLLM."""
        return _SHARED_GPU_FRACTION * self.share if self.gpus and self.share < 1 else None

    def __str__(self) -> str:
        if self.gpus:
            part = f" ({self.share:.0%})" if self.share < 1 else ""
            return f"GPU {','.join(self.gpus)}{part}"
        return f"core {','.join(map(str, self.cores))}" if self.cores else ""


def detect() -> Machine:
    """Look at this machine. A CUDA_VISIBLE_DEVICES in the environment is respected.

    Raises:
        GraphError: there is an nvidia-smi, and it does not work.
    """
    try:
        cpuinfo = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")),
        has_bfloat16=computes_bfloat16(cpuinfo),
    )


def computes_bfloat16(cpuinfo: str) -> bool:
    """Whether the cores that `/proc/cpuinfo` describes do. An x86 without AVX-512 has it emulated and takes some 25
    times as long as for float32 (a matrix product in PyTorch 2.13); what is unknown is taken to do."""
    flags = next((line.split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])
    return not flags or "avx512f" in flags


def even_place(machine: Machine, index: int, workers: int) -> Place:
    """For worker `index` of so many that share the machine evenly, several on a GPU if need be."""
    if machine.has_gpu:
        per_gpu = -(-workers // len(machine.gpus))
        return Place(gpus=(machine.gpus[index % len(machine.gpus)],), share=1 / per_gpu)
    return Place(cores=(machine.cores[index % len(machine.cores)],), dtype=_dtype(machine))


def start_wave(machine: Machine, index: int) -> int:
    """When to start worker `index` of those that share the machine evenly: workers of one wave start together, a wave
    after the one before is ready.

    vLLM measures free GPU memory at start; two that do so on one GPU at once would count each other's.
    """
    return index // len(machine.gpus) if machine.has_gpu else 0


def free_place(machine: Machine, taken: Iterable[Place], *, gpus: float, cores: int) -> Place:
    """For one more worker beside those at `taken`, that wants so many GPUs, or so many cores where there are none.

    GPUs are given away once, except in fractions. Cores are shared when they run out: a machine without GPUs is for
    trying things out.

    Raises:
        GraphError: there are not enough; the message says how many are free.
    """
    taken = list(taken)
    if not machine.has_gpu:
        if cores > len(machine.cores):
            raise GraphError(f"it wants {cores} cores and this machine has {len(machine.cores)}; lower cores")
        users = {core: sum(core in place.cores for place in taken) for core in machine.cores}
        chosen = sorted(machine.cores, key=lambda core: (users[core], core))[:cores]
        return Place(cores=tuple(sorted(chosen)), dtype=_dtype(machine))
    used = {gpu: sum(place.share for place in taken if gpu in place.gpus) for gpu in machine.gpus}
    if gpus < 1:
        # The fullest one that has room: whole ones stay whole.
        fitting = [gpu for gpu in machine.gpus if used[gpu] + gpus <= 1 + _SLACK]
        if not fitting:
            raise GraphError(f"it wants {gpus:g} of a GPU and no GPU has that left; lower counts or gpus")
        return Place(gpus=(max(fitting, key=lambda gpu: used[gpu]),), share=gpus)
    free = [gpu for gpu in machine.gpus if not used[gpu]]
    if len(free) < gpus:
        raise GraphError(
            f"it wants {gpus:g} GPU(s), and {len(free)} of {len(machine.gpus)} are free; lower counts, or have workers "
            "share a GPU (gpus: 0.5)"
        )
    return Place(gpus=tuple(free[: int(gpus)]))


def _dtype(machine: Machine) -> str:
    return "" if machine.has_bfloat16 else "float32"


def _gpus(visible: str | None) -> tuple[str, ...]:
    """Raises GraphError where a driver is installed and does not work: cores would be taken for what is an accident."""
    named = None if visible is None else tuple(n for name in visible.split(",") if (n := name.strip()) not in _NONE)
    # Asked first: a folder of the PATH that may not be read would look like a program that may not be run.
    if named == () or which(_QUERY[0]) is None:
        return ()
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _broken(f"did not answer within {_QUERY_TIMEOUT_S:g} s") from None
    except OSError as e:
        raise _broken(f"cannot be run ({e.strerror or e})") from None
    if done.returncode:
        # It complains on stdout.
        said = " ".join((done.stderr.strip() or done.stdout.strip() or "it said nothing").split())
        raise _broken(f"ended with status {done.returncode}: {said[:_MOST_SAID].rstrip('.')}")
    found = tuple(done.stdout.split())
    if not found:
        raise _broken("lists no GPU")
    return found if named is None else named


def _broken(how: str) -> GraphError:
    return GraphError(
        f"nvidia-smi {how}; repair the NVIDIA driver, or, to run on cores all the same, set CUDA_VISIBLE_DEVICES= (to "
        "nothing)."
    )
