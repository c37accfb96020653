"""From a store URL to a registry."""

from __future__ import annotations

from vllm_pd.errors import SettingsError
from vllm_pd.layered import nearest, redact
from vllm_pd.state.base import Registry
from vllm_pd.state.memory_registry import MemoryRegistry, MemoryStore

REDIS_SCHEMES = ("redis", "rediss", "unix")
_memory_stores: dict[str, MemoryStore] = {}


def open_registry(url: str, namespace: str, *, timeout_s: float = 0.5) -> Registry:
    """The registry behind `url`; it connects at its first call.

    `memory://NAME` is shared by everything in this process that opens the same NAME, and by nothing else.

    Args:
        timeout_s: deadline of one call.

    Raises:
        SettingsError: unknown scheme, malformed URL, or a namespace that cannot be part of a key.
    """
    scheme, separator, name = url.partition("://")
    known = [*REDIS_SCHEMES, "memory"]
    if not separator or scheme not in known:
        raise SettingsError(
            f"The store URL {redact(url)!r} must begin with one of {', '.join(f'{s}://' for s in known)}"
            f"{nearest(scheme, known) if separator else ''}."
        )
    if scheme == "memory":
        return MemoryRegistry(namespace, _memory_stores.setdefault(name, MemoryStore()))
    # redis-py takes 0.1 s to import, which a process without a store need not pay.
    from vllm_pd.state.redis_registry import RedisRegistry

    return RedisRegistry(url, namespace, timeout_s=timeout_s)
