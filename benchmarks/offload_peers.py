"""Three systems that keep KV blocks below the GPU, as real servers: our tiers, vLLM's own tiering, LMCache; and none.

All run inside the `pd` connector on the CPU platform, so that nothing but the tiers differs. vLLM refuses to
offload there; its manager and its file tier get our worker for the copies between KV cache and host memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.common import cpu_seconds
from benchmarks.lmcache_server import LMCacheServer
from benchmarks.pd_ttft import MODEL
from vllm_pd.graph.local import LocalCluster, LocalWorker

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
DTYPE = "float32"
"""The same sizes on every machine: without AVX-512 bfloat16 is emulated."""
_ENGINE, _SCHEDULER = "VLLM::", "VLLM::Engine"
"""How vLLM names its engine's processes, those that compute and the scheduler's, and the latter alone."""
CALM_S = 0.6
SETTLE_DEADLINE_S = 60.0

OURS, VLLM, LMCACHE, NOTHING = "vllm-pd", "vLLM tiering (fs)", "LMCache", "no tiers"


def installed() -> list[str]:
    """Those that can run here, ours first."""
    return [OURS, VLLM] + ([LMCACHE] if importlib.util.find_spec("lmcache") else [])


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of every system alike. Host memory in bytes; the disk is large enough for all."""

    memory: int
    block_tokens: int
    gpu_blocks: int
    max_model_len: int


class CpuSeconds(NamedTuple):
    """What processes have used, by threads.

    Attributes:
        scheduler: the engine's, which on the CPU platform computes in turn with the model.
        beside: all but that one and the model's own; those that have ended included.
    """

    total: float
    scheduler: float
    beside: float


@dataclass(slots=True)
class System:
    """A running worker with one of the three below it.

    Attributes:
        folder: where its blocks are on the disk.
        server: LMCache's, which holds the blocks outside the worker.
    """

    worker: LocalWorker
    folder: Path
    server: LMCacheServer | None = None

    @property
    def groups(self) -> list[int]:
        """Process groups of both, by leader."""
        return [self.worker.process.pid] + ([self.server.process.pid] if self.server else [])

    @property
    def url(self) -> str:
        return self.worker.url

    def loaded_tokens(self) -> float:
        """Prompt tokens that came from below the GPU, ever."""
        return self.worker.metrics().value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")

    def disk_bytes(self) -> tuple[int, int]:
        """Read from and written to disks by all its processes, ever."""
        read = written = 0
        for pid in _members(self.groups):
            # A process that ends meanwhile.
            with contextlib.suppress(OSError):
                values = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
                read, written = read + int(values["read_bytes"]), written + int(values["write_bytes"])
        return read, written

    def cpu_seconds(self) -> CpuSeconds:
        """Of the processes that it has now."""
        total = scheduler = model = 0.0
        for pid in _members(self.groups):
            with contextlib.suppress(OSError):
                total += cpu_seconds(pid)
                name = Path(f"/proc/{pid}/comm").read_text()
                if name.startswith(_ENGINE):
                    main = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
                    if name.startswith(_SCHEDULER):
                        scheduler += main
                    else:
                        model += main
        return CpuSeconds(total, scheduler, total - scheduler - model)

    def settle(self) -> None:
        """Wait until what was computed last has arrived on the disk: nothing more is written for a moment."""
        deadline = time.monotonic() + SETTLE_DEADLINE_S
        last, since = self.disk_bytes()[1], time.monotonic()
        while time.monotonic() - since < CALM_S:
            if time.monotonic() > deadline:
                raise SystemExit("The tier goes on writing; nothing can be measured beside it.")
            time.sleep(0.1)
            now = self.disk_bytes()[1]
            if now != last:
                last, since = now, time.monotonic()

    def forget(self) -> None:
        """Empty the GPU-side cache, and take the tier's files out of the page cache: they come from the disk then."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(request, timeout=60).close()
        for path in self.folder.rglob("*"):
            with contextlib.suppress(OSError):
                _leave_page_cache(path)


@contextmanager
def running(name: str, model: Path, sizes: Sizes, place: Path, **settings: Any) -> Iterator[System]:
    """Start it.

    Args:
        place: for the folders of all systems; what one left there in an earlier run it finds again.
        settings: further ones of the worker.

    Raises:
        ProcessError: it did not start.
    """
    folder, logs = (place / name.split()[0] / part for part in ("blocks", "logs"))
    for each in (folder, logs):
        each.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        server = stack.enter_context(_server(name, sizes, folder, logs))
        file = logs / "worker.yaml"
        file.write_text(yaml.safe_dump({**_settings(name, sizes, folder, server), **settings}))
        cluster = LocalCluster(
            model=model, both=1, store=False, router=False, max_model_len=sizes.max_model_len,
            block_size=sizes.block_tokens, kv_blocks=sizes.gpu_blocks, log_dir=logs,
            worker_args=("--served-model-name", MODEL, "--dtype", DTYPE),
            env={
                "VLLM_PD_CONFIG": str(file), "VLLM_SERVER_DEV_MODE": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            },
        )  # fmt: skip
        stack.enter_context(cluster)
        yield System(cluster.worker("both-0"), folder, server)


def _server(name: str, sizes: Sizes, folder: Path, logs: Path) -> AbstractContextManager[LMCacheServer | None]:
    if name != LMCACHE:
        return nullcontext()
    disk = f'{{"type": "fs_native", "base_path": "{folder}", "use_odirect": true}}'
    return LMCacheServer(logs, gib=sizes.memory / GIB, chunk=2 * sizes.block_tokens, args=("--l2-adapter", disk))


def _settings(name: str, sizes: Sizes, folder: Path, server: LMCacheServer | None) -> dict[str, Any]:
    if server is not None:
        return {"offload": "lmcache", "lmcache_url": server.url}
    if name == NOTHING:
        return {"offload": "none"}
    memory: dict[str, Any] = {"cpu_gib": sizes.memory / GIB}
    if name == OURS:
        return {**memory, "ssd_path": str(folder), "ssd_gib": 4}
    spec = {"spec_name": "FileTierSpec", "spec_module_path": "benchmarks.file_tier_spec"}
    return {
        **memory,
        "load_gate": "always",
        "tiers": {**spec, "eviction_policy": "lru", "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}]},
    }


def _members(leaders: list[int]) -> Iterator[int]:
    """Processes of these groups: each server leads one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry.name)) in leaders:
                    yield int(entry.name)


def _leave_page_cache(path: Path) -> None:
    if not path.is_file():
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        # What is not on the disk yet stays in the cache.
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
