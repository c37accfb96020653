"""A real `lmcache server` for benchmarks and tests: its ports, its shared memory, its end."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from vllm_pd.graph.ports import free_ports
from vllm_pd.graph.process import ManagedProcess, ProcessSpec

START_DEADLINE_S = 240.0
HOST = "127.0.0.1"


class LMCacheServer:
    """Started by `with`; may be killed and started again, at the same address.

    Args:
        log_dir: folder for its log.
        gib: memory for blocks.
        chunk: tokens that it stores together; a multiple of the worker's block size.
        args: further arguments of `lmcache server`.
    """

    def __init__(self, log_dir: Path, *, gib: float = 0.25, chunk: int = 64, args: Sequence[str] = ()) -> None:
        self.port, self._http, self._prometheus = free_ports(3)
        self._log = log_dir / "lmcache.log"
        self._shm = f"vllm_pd_{secrets.token_hex(4)}"
        self._args = ["--l1-size-gb", str(gib), "--chunk-size", str(chunk), *args]
        self.process = self._made()

    @property
    def url(self) -> str:
        """What `--pd-lmcache-url` is given."""
        return f"tcp://{HOST}:{self.port}"

    @property
    def shared_memory(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"*{self._shm}*"))

    def restart(self) -> None:
        """After `process.kill()` or `process.stop()`."""
        self._start()

    def _made(self) -> ManagedProcess:
        command = [str(Path(sys.executable).with_name("lmcache")), "server", "--host", HOST, "--port", str(self.port)]
        command += ["--http-host", HOST, "--http-port", str(self._http), "--prometheus-port", str(self._prometheus)]
        command += [
            "--eviction-policy",
            "LRU",
            "--supported-transfer-mode",
            "auto",
            "--shm-name",
            self._shm,
            *self._args,
        ]
        env = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}
        return ManagedProcess(ProcessSpec("lmcache", command, self._log, env))

    def _start(self) -> None:
        self.process.start()
        try:
            self.process.wait_ready(f"http://{HOST}:{self._http}/healthcheck", deadline_s=START_DEADLINE_S)
        except BaseException:
            self.process.kill()
            raise

    def __enter__(self) -> LMCacheServer:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.stop(grace_s=30.0)
        for file in self.shared_memory:
            # One that was killed and not started again leaves it.
            file.unlink(missing_ok=True)
