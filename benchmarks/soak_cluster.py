"""The processes of the soak: eight mock workers, a router and a store on loopback."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.common import cpu_seconds
from benchmarks.mock_cluster import MockCluster, MockRouter, MockWorker
from vllm_pd.graph.metrics_text import scrape

ROLES = ("prefill",) * 3 + ("decode",) * 5
LEASE_S = 4.0
_MIB = 1 << 20
# One request that hangs on a worker that is well otherwise is found by its timeout alone, in either leg.
_ROUTER_FLAGS = ("--first-byte-timeout", "20", "--prefill-timeout", "20", "--idle-timeout", "10")


class SoakCluster(MockCluster):
    """Complete once it is entered."""

    def __init__(self, *, speed: float, sequences: int) -> None:
        super().__init__()
        self.workers: list[MockWorker] = []
        self._flags = ["--speed", str(speed), "--max-num-seqs", str(sequences), "--lease", str(LEASE_S)]
        self._router: MockRouter | None = None

    def __enter__(self) -> SoakCluster:
        super().__enter__()
        try:
            self.workers += self.start_workers(ROLES, *self._flags)
            self._router = self.router(*_ROUTER_FLAGS)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    @property
    def router_url(self) -> str:
        return self._router.url if self._router is not None else ""

    @property
    def router_pid(self) -> int:
        return self._router.pid if self._router is not None else 0

    def router_memory(self) -> float:
        """MiB that the router's process has in memory."""
        pages = int(Path(f"/proc/{self.router_pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / _MIB

    def router_caches(self) -> float:
        """MiB that the router keeps of earlier prompts, as it says. Raises OSError."""
        return scrape(self.router_url).value("vllm_pd_router_prompt_cache_bytes") / _MIB

    def router_files(self) -> int:
        """Descriptors that the router's process has open."""
        return sum(1 for _ in Path(f"/proc/{self.router_pid}/fd").iterdir())

    def router_cpu(self) -> float:
        """Seconds of CPU time of the router's process."""
        return cpu_seconds(self.router_pid)
