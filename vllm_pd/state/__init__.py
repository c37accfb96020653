"""Cluster state: who is alive, in what role, with what load. Imports neither vllm nor torch.

`base` has the values and the one Protocol; `redis_registry` and `memory_registry` implement it, and one conformance
suite (`tests/conformance/registry.py`) runs on both.
"""

from vllm_pd.state.base import (
    Epoch,
    HeartbeatResult,
    PoolId,
    PoolSpec,
    Registry,
    RegistrySnapshot,
    Role,
    TokenizerFiles,
    WorkerId,
    WorkerLoad,
    WorkerRecord,
    WorkerState,
)

__all__ = [
    "Epoch",
    "HeartbeatResult",
    "PoolId",
    "PoolSpec",
    "Registry",
    "RegistrySnapshot",
    "Role",
    "TokenizerFiles",
    "WorkerId",
    "WorkerLoad",
    "WorkerRecord",
    "WorkerState",
]
