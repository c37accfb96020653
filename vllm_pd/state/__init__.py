"""Cluster state: who is alive, in what role, with what load, and who holds which blocks. Without vllm and torch.

`base` and `block_index` have the values and Protocols. Each has an implementation in Redis and one in memory, and one
conformance suite (`tests/conformance/`) runs on both.
"""

from vllm_pd.state.base import (
    Epoch,
    HeartbeatResult,
    MoveState,
    PoolId,
    PoolSpec,
    Registry,
    RegistrySnapshot,
    Role,
    RoleMove,
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
from vllm_pd.state.memory_prefill_queue import MemoryPrefillQueue
from vllm_pd.state.memory_registry import MemoryRegistry
from vllm_pd.state.memory_roles import MemoryRoles
from vllm_pd.state.memory_store import MemoryStore
from vllm_pd.state.open_registry import open_block_index, open_prefill_queue, open_registry, open_roles
from vllm_pd.state.prefill_queue import (
    Claim,
    Claimant,
    DeadJob,
    JobId,
    JobInfo,
    JobResult,
    PrefillJob,
    PrefillQueue,
    QueueDepth,
    QueueLimits,
)
from vllm_pd.state.roles import Roles, WantedRole, Wished

__all__ = [
    "START",
    "BlockChange",
    "BlockIndex",
    "BlockWriter",
    "CacheStats",
    "Claim",
    "Claimant",
    "DeadJob",
    "Digest",
    "Epoch",
    "HeartbeatResult",
    "HeldBlocks",
    "Holder",
    "IndexStats",
    "JobId",
    "JobInfo",
    "JobResult",
    "MemoryBlockIndex",
    "MemoryPrefillQueue",
    "MemoryRegistry",
    "MemoryRoles",
    "MemoryStore",
    "MoveState",
    "Packed",
    "PoolId",
    "PoolSpec",
    "Position",
    "PrefillJob",
    "PrefillQueue",
    "QueueDepth",
    "QueueLimits",
    "Registry",
    "RegistrySnapshot",
    "Role",
    "RoleMove",
    "Roles",
    "RouterWork",
    "StreamEntry",
    "Tier",
    "TokenizerFiles",
    "WantedRole",
    "Wished",
    "WorkerId",
    "WorkerLoad",
    "WorkerRecord",
    "WorkerState",
    "open_block_index",
    "open_prefill_queue",
    "open_registry",
    "open_roles",
]
