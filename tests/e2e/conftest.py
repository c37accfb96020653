"""One real cluster for the tests of this folder: a prefill and a decode worker, a router, and a plain server beside.

The model is the tiny random one in float32 (ties between its logits are then rare), one scheduler step takes at most
`CHUNK` tokens, and the prompts of a test fit into the GPU-side cache only together with the CPU tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.ask import Endpoint
from vllm_pd.graph.local import LocalCluster

MODEL = "m"
BLOCK = 32
CHUNK = 256
LEASE_S = 6.0

WORKER_ARGS = (
    "--served-model-name", MODEL, "--dtype", "float32", "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "16",
)  # fmt: skip
# vLLM's own shape on a GPU. On a CPU it gives the worker a process of its own, whose imports are a third of what a
# start costs; the graphs and the tests of the tiers have that shape.
WORKER_IN_ENGINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
SETTINGS = {"VLLM_PD_CPU_GIB": "0.125", "VLLM_PD_LEASE_S": str(LEASE_S)}


def tiny_cluster(
    model: Path, log_dir: Path, *, args: tuple[str, ...] = (), env: Mapping[str, str] | None = None, **workers: int
) -> LocalCluster:
    """A cluster of these workers (`prefill=1, decode=1, ...`), not started."""
    return LocalCluster(
        model=model,
        block_size=BLOCK,
        kv_blocks=192,
        worker_args=(*WORKER_ARGS, *args),
        # Workers of these tests are mostly idle, where handing over is not worth it.
        router_args=("--disagg", "always"),
        env=SETTINGS | dict(env or {}),
        log_dir=log_dir,
        **workers,
    )


@pytest.fixture(scope="session")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    # Caches can be reset from outside.
    dev_mode = {"VLLM_SERVER_DEV_MODE": "1", **WORKER_IN_ENGINE}
    made = tiny_cluster(tiny_model, tmp_path_factory.mktemp("cluster"), env=dev_mode, prefill=1, decode=1, plain=1)
    with made:
        yield made
    # A killed server cannot clean its shared memory; the launcher does, and says so.
    assert not made.left.processes and not made.left.ports


@pytest.fixture(scope="session")
def through_router(cluster: LocalCluster) -> Endpoint:
    return Endpoint(cluster.router_url, MODEL)


@pytest.fixture(scope="session")
def plain(cluster: LocalCluster) -> Endpoint:
    return Endpoint(cluster.of_role(None)[0].url, MODEL)
