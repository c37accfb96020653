"""Cluster state: who is alive, in what role, with what load, and who holds which blocks. Without vllm and torch.

`base` and `block_index` have the values and Protocols. Each has an implementation in Redis and one in memory, and one
conformance suite (`tests/conformance/`) runs on both.
"""

from vllm_pd.state.base import (
    Epoch,
    HeartbeatResult,
    PoolId,
    PoolSpec,
    Registry,
    RegistrySnapshot,
    Role,
    RouterWork,
    TokenizerFiles,
    WorkerId,
    WorkerLoad,
    WorkerRecord,
    WorkerState,
)
from vllm_pd.state.block_index import (
    START,
    BlockChange,
    BlockIndex,
    BlockWriter,
    CacheStats,
    Digest,
    HeldBlocks,
    Holder,
    IndexStats,
    Packed,
    Position,
    StreamEntry,
    Tier,
)
from vllm_pd.state.memory_block_index import MemoryBlockIndex
from vllm_pd.state.memory_registry import MemoryRegistry
from vllm_pd.state.memory_store import MemoryStore
from vllm_pd.state.open_registry import open_block_index, open_registry

__all__ = [
    "START",
    "BlockChange",
    "BlockIndex",
    "BlockWriter",
    "CacheStats",
    "Digest",
    "Epoch",
    "HeartbeatResult",
    "HeldBlocks",
    "Holder",
    "IndexStats",
    "MemoryBlockIndex",
    "MemoryRegistry",
    "MemoryStore",
    "Packed",
    "PoolId",
    "PoolSpec",
    "Position",
    "Registry",
    "RegistrySnapshot",
    "Role",
    "RouterWork",
    "StreamEntry",
    "Tier",
    "TokenizerFiles",
    "WorkerId",
    "WorkerLoad",
    "WorkerRecord",
    "WorkerState",
    "open_block_index",
    "open_registry",
]
