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
from vllm_pd.state.memory_registry import MemoryRegistry, MemoryStore
from vllm_pd.state.open_registry import open_registry

__all__ = [
    "Epoch",
    "HeartbeatResult",
    "MemoryRegistry",
    "MemoryStore",
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
    "open_registry",
]
