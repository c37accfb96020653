"""Wanted roles in Redis (or Valkey, 6.2 or newer): one HASH per pool, each field with an end of its own."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_pd.state import scripts
from vllm_pd.state.base import Epoch, PoolId, Role, WorkerId
from vllm_pd.state.keys import Keys
from vllm_pd.state.redis_calls import RedisCalls
from vllm_pd.state.roles import WantedRole


class RedisRoles:
    """Implements `Roles` over redis-py.

    Args:
        url: store URL.
        namespace: clusters of different namespaces share a store without seeing each other.
        timeout_s: deadline of one call.

    Raises:
        SettingsError: malformed URL or namespace.
    """

    def __init__(self, url: str, namespace: str, *, timeout_s: float = 0.5) -> None:
        self._keys = Keys(namespace)
        self._calls = RedisCalls(url, timeout_s=timeout_s, longest_s=timeout_s)

    @property
    def malformed_total(self) -> int:
        """Entries of the store that were skipped because they could not be read, since the start."""
        return self._calls.malformed_total

    async def set(self, pool: PoolId, worker: WorkerId, wanted: WantedRole, ttl_ms: int) -> bool:
        args = (worker, wanted.epoch, ttl_ms, wanted.role)
        async with self._calls.answer():
            done: int = await self._calls.client.eval(scripts.SET_ROLE, 1, self._keys.roles(pool), *args)
        return bool(done)

    async def get(self, pool: PoolId) -> Mapping[WorkerId, WantedRole]:
        key = self._keys.roles(pool)
        async with self._calls.answer():
            now, flat = await self._calls.client.eval(scripts.FIELDS, 1, key)
        wishes, bad = {}, []
        for worker, value in zip(flat[0::2], flat[1::2], strict=True):
            try:
                ends, epoch, role = value.decode().split(":")
                if int(ends) > int(now):
                    wishes[WorkerId(worker.decode())] = WantedRole(Role(role), Epoch(int(epoch)))
            except ValueError:
                bad.append(f"{key} {worker!r}")
        self._calls.report(bad)
        return wishes

    async def clear(self, pool: PoolId, worker: WorkerId, epoch: Epoch) -> bool:
        async with self._calls.answer():
            done: int = await self._calls.client.eval(scripts.CLEAR_ROLE, 1, self._keys.roles(pool), worker, epoch)
        return bool(done)

    async def close(self) -> None:
        await self._calls.close()
