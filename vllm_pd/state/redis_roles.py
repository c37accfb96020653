"""Wanted roles in Redis (or Valkey, 6.2 or newer): one HASH per pool, each field with an end of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vllm_pd.state import scripts
from vllm_pd.state.base import Epoch, PoolId, WorkerId
from vllm_pd.state.codec import decode_wish, encode_wish
from vllm_pd.state.keys import Keys
from vllm_pd.state.redis_calls import RedisCalls
from vllm_pd.state.roles import AWAY_FROM, Stays, WantedRole, Wished

_NOBODY_NEEDED: Stays = MappingProxyType({})


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
        return await self.set_unless_last(pool, worker, wanted, ttl_ms, _NOBODY_NEEDED) is Wished.WISHED

    async def set_unless_last(
        self,
        pool: PoolId,
        worker: WorkerId,
        wanted: WantedRole,
        ttl_ms: int,
        stays: Stays,
        *,
        term: int | None = None,
    ) -> Wished:
        keys = [self._keys.roles(pool), self._keys.planner(pool)]
        args: list[str | int] = [worker, wanted.epoch, ttl_ms, encode_wish(wanted), wanted.by]
        args.append("" if term is None else term)
        for kind, members in stays.items():
            args += [AWAY_FROM[kind], len(members), *(value for member in members for value in member)]
        async with self._calls.answer():
            reply: bytes = await scripts.SET_ROLE.run(self._calls.client, keys, args)
        return Wished(reply.decode())

    async def get(self, pool: PoolId) -> Mapping[WorkerId, WantedRole]:
        key = self._keys.roles(pool)
        async with self._calls.answer():
            now, flat = await scripts.FIELDS.run(self._calls.client, [key], [])
        wishes, bad = {}, []
        for worker, value in zip(flat[0::2], flat[1::2], strict=True):
            try:
                ends, wanted = decode_wish(value)
                if ends > int(now):
                    wishes[WorkerId(worker.decode())] = wanted
            except ValueError:
                bad.append(f"{key} {worker!r}")
        self._calls.report(bad)
        return wishes

    async def of(self, pool: PoolId, worker: WorkerId) -> WantedRole | None:
        key = self._keys.roles(pool)
        async with self._calls.answer():
            now, value = await scripts.FIELD.run(self._calls.client, [key], [worker])
        if value is None:
            return None
        try:
            ends, wanted = decode_wish(value)
        except ValueError:
            self._calls.report([f"{key} {worker}"])
            return None
        return wanted if ends > int(now) else None

    async def clear(self, pool: PoolId, worker: WorkerId, epoch: Epoch, id: str = "") -> bool:
        keys, args = [self._keys.roles(pool)], [worker, epoch, id]
        async with self._calls.answer():
            done: int = await scripts.CLEAR_ROLE.run(self._calls.client, keys, args)
        return bool(done)

    async def close(self) -> None:
        await self._calls.close()
