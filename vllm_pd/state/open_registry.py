"""From a store URL to the registry, the block index and whatever else is in it."""

from __future__ import annotations

from vllm_pd.errors import SettingsError
from vllm_pd.layered import nearest
from vllm_pd.state.base import Registry
from vllm_pd.state.block_index import BlockIndex
from vllm_pd.state.demand import DemandBoard
from vllm_pd.state.memory_block_index import MemoryBlockIndex
from vllm_pd.state.memory_demand import MemoryDemandBoard
from vllm_pd.state.memory_planner_board import MemoryPlannerBoard
from vllm_pd.state.memory_prefill_queue import MemoryPrefillQueue
from vllm_pd.state.memory_registry import MemoryRegistry
from vllm_pd.state.memory_roles import MemoryRoles
from vllm_pd.state.memory_store import MemoryStore
from vllm_pd.state.planner_board import PlannerBoard
from vllm_pd.state.prefill_queue import PrefillQueue, QueueLimits
from vllm_pd.state.roles import Roles
from vllm_pd.state.store_url import REDIS_SCHEMES, address_of

_memory_stores: dict[str, MemoryStore] = {}


def open_registry(url: str, namespace: str, *, timeout_s: float = 0.5) -> Registry:
    """The registry behind `url`; it connects at its first call.

    `memory://NAME` is shared by everything in this process that opens the same NAME, and by nothing else.

    Args:
        timeout_s: deadline of one call.

    Raises:
        SettingsError: unknown scheme, malformed URL, or a namespace that cannot be part of a key.
    """
    memory = memory_store(url)
    if memory is not None:
        return MemoryRegistry(namespace, memory)
    # redis-py takes 0.1 s to import, which a process without a store need not pay.
    from vllm_pd.state.redis_registry import RedisRegistry

    return RedisRegistry(url, namespace, timeout_s=timeout_s)


def open_block_index(url: str, namespace: str, *, timeout_s: float = 0.5) -> BlockIndex:
    """The block index behind `url`; otherwise as `open_registry`."""
    memory = memory_store(url)
    if memory is not None:
        return MemoryBlockIndex(namespace, memory)
    from vllm_pd.state.redis_block_index import RedisBlockIndex

    return RedisBlockIndex(url, namespace, timeout_s=timeout_s)


def open_roles(url: str, namespace: str, *, timeout_s: float = 0.5) -> Roles:
    """The wanted roles behind `url`; otherwise as `open_registry`."""
    memory = memory_store(url)
    if memory is not None:
        return MemoryRoles(namespace, memory)
    from vllm_pd.state.redis_roles import RedisRoles

    return RedisRoles(url, namespace, timeout_s=timeout_s)


def open_prefill_queue(
    url: str, namespace: str, *, limits: QueueLimits | None = None, timeout_s: float = 0.5
) -> PrefillQueue:
    """The prefill queue behind `url`; otherwise as `open_registry`."""
    memory = memory_store(url)
    if memory is not None:
        return MemoryPrefillQueue(namespace, memory, limits=limits)
    from vllm_pd.state.redis_prefill_queue import RedisPrefillQueue

    return RedisPrefillQueue(url, namespace, limits=limits, timeout_s=timeout_s)


def open_demand(url: str, namespace: str, *, timeout_s: float = 0.5) -> DemandBoard:
    """The routers' demand reports behind `url`; otherwise as `open_registry`."""
    memory = memory_store(url)
    if memory is not None:
        return MemoryDemandBoard(namespace, memory)
    from vllm_pd.state.redis_demand import RedisDemandBoard

    return RedisDemandBoard(url, namespace, timeout_s=timeout_s)


def open_planner_board(url: str, namespace: str, *, timeout_s: float = 0.5, dry: bool = False) -> PlannerBoard:
    """What planners share behind `url`, those that act or (`dry`) those that only try out; as `open_registry`."""
    memory = memory_store(url)
    if memory is not None:
        return MemoryPlannerBoard(namespace, memory, dry=dry)
    from vllm_pd.state.redis_planner_board import RedisPlannerBoard

    return RedisPlannerBoard(url, namespace, timeout_s=timeout_s, dry=dry)


def memory_store(url: str) -> MemoryStore | None:
    """The store of this process that `url` names, or None when it is a server's.

    Raises:
        SettingsError: unknown scheme.
    """
    scheme, separator, name = url.partition("://")
    known = [*REDIS_SCHEMES, "memory"]
    if not separator or scheme not in known:
        raise SettingsError(
            f"The store URL {address_of(url)!r} must begin with one of {', '.join(f'{s}://' for s in known)}"
            f"{nearest(scheme, known) if separator else ''}."
        )
    return _memory_stores.setdefault(name, MemoryStore()) if scheme == "memory" else None
