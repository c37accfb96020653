"""Command lines and environments of the processes of a local cluster. Pure: starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_pd.graph.machine import Place
from vllm_pd.graph.ports import LOOPBACK
from vllm_pd.settings import CONNECTOR
from vllm_pd.state.base import Role

SETTINGS_PREFIX = "VLLM_PD_"
SHUTDOWN_TIMEOUT_S = 15
_CPU_KV_BYTES = 1 << 30
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""glibc, left alone, gives the tensors of a step back to the kernel or keeps them, as chance has laid out the heap, and
where it does not keep them each step has them mapped and zeroed anew: a tenth of a prefill's time with a tiny model. 32
MiB is the largest threshold that glibc takes; to other C libraries this says nothing. (mallopt(3))"""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What all workers of a cluster have in common.

    Attributes:
        model: folder or hub name.
        max_model_len: longest sequence in tokens; None leaves it to vLLM.
        shutdown_timeout_s: what requests under way get to finish at the end; None leaves it to vLLM.
        block_size: tokens per KV block; used on CPUs, which need a multiple of 32.
        kv_blocks: KV blocks per worker; used on CPUs, where vLLM's own choice is gigabytes.
        args: further arguments of `vllm serve`.
    """

    model: str
    max_model_len: int | None = 2048
    block_size: int = 32
    kv_blocks: int = 128
    args: tuple[str, ...] = ()
    shutdown_timeout_s: int | None = SHUTDOWN_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One `vllm serve` process. Without a role it is a plain one, that knows nothing of vllm-pd.

    Attributes:
        args: arguments that only this worker gets, after all others.
        env: variables that only this worker gets.
    """

    name: str
    role: Role | None
    port: int
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """One router process. `args` come after all others. `host` is the address it listens on."""

    port: int
    name: str = "router"
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    host: str = LOOPBACK

    @property
    def url(self) -> str:
        """Under which this machine reaches it."""
        host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def worker_command(
    worker: WorkerSpec,
    engine: EngineSpec,
    place: Place,
    *,
    programs: Path,
    store: str,
    namespace: str,
) -> list[str]:
    """`vllm serve` for one worker.

    Args:
        programs: folder that holds the `vllm` program.
        store: URL of the store; empty for none.
    """
    command = [str(programs / "vllm"), "serve", engine.model, "--host", LOOPBACK, "--port", str(worker.port)]
    if engine.max_model_len is not None:
        command += ["--max-model-len", str(engine.max_model_len)]
    if engine.shutdown_timeout_s is not None:
        command += ["--shutdown-timeout", str(engine.shutdown_timeout_s)]
    if place.gpus:
        if place.memory_fraction is not None:
            command += ["--gpu-memory-utilization", f"{place.memory_fraction:.2f}"]
    else:
        # Compiling takes over a minute at each start and gains nothing for small models on a CPU.
        command += ["--enforce-eager", "--block-size", str(engine.block_size)]
        # A size that is given keeps vLLM from demanding nearly all memory of the machine for each worker, and from a
        # warm-up that only measures; how much is allocated follows from the number of blocks.
        command += ["--num-gpu-blocks-override", str(engine.kv_blocks), "--kv-cache-memory-bytes", str(_CPU_KV_BYTES)]
        if place.dtype:
            # Before the arguments that are given: theirs holds.
            command += ["--dtype", place.dtype]
    if worker.role is not None:
        command += ["--kv-connector", CONNECTOR, "--role", str(worker.role)]
        if store:
            command += ["--pd-store", store, "--pd-namespace", namespace]
    return [*command, *engine.args, *worker.args]


def worker_env(worker: WorkerSpec, engine: EngineSpec, place: Place, *, inherited: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of one worker. Settings of vllm-pd in the launcher's environment do not leak into it."""
    env = clean_env(inherited) | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if Path(engine.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if place.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
    else:
        # Cores of its own: OpenMP threads of two workers on one core spin against each other.
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, place.cores))
        env = _KEEP_MEMORY | env
    return env | dict(worker.env)


def router_command(
    router: RouterSpec, workers: list[WorkerSpec], *, programs: Path, store: str, namespace: str
) -> list[str]:
    """`vllm-pd-router`, which finds the workers in the store, or is given them when there is no store."""
    command = [str(programs / "vllm-pd-router"), "--host", router.host, "--port", str(router.port)]
    if store:
        command += ["--store", store, "--namespace", namespace]
    else:
        for worker in workers:
            if worker.role is not None:
                command += ["--worker", f"{worker.url}={worker.role}"]
    return [*command, *router.args]


def router_env(router: RouterSpec, *, inherited: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the router."""
    return clean_env(inherited) | dict(router.env)


def clean_env(inherited: Mapping[str, str]) -> dict[str, str]:
    """An environment without settings of vllm-pd, in which Python's output is seen at once."""
    env = {key: value for key, value in inherited.items() if not key.startswith(SETTINGS_PREFIX)}
    return env | {"PYTHONUNBUFFERED": "1"}
