"""The planners' board in Redis (or Valkey, 6.2 or newer). Leases are measured by the store's clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_pd.state.base import PoolId
from vllm_pd.state.keys import Keys
from vllm_pd.state.planner_board import JOURNAL_LENGTH, JOURNAL_TTL_MS, MEMORY_TTL_MS, TERM_TTL_MS, Leader
from vllm_pd.state.redis_calls import RedisCalls, Script
from vllm_pd.state.scripts import LIVE, TOUCH_POOL

_LEADER = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function ms(n) return string.format('%.0f', n) end
local stored = redis.call('HMGET', KEYS[1], 'planner', 'term', 'ends', 'lease')
local planner, term = stored[1] or '', tonumber(stored[2]) or 0
local left = (tonumber(stored[3]) or 0) - now
-- More than the lease is left where the clock was set back: nobody would lead for as long.
if left > (tonumber(stored[4]) or 0) then left = 0 end
"""

_LEAD = Script(
    f"""
-- KEYS: planner. ARGV: planner, lease ms.
{_LEADER}
local lease = tonumber(ARGV[2])
if left <= 0 then
  planner, term, left = ARGV[1], math.max(term + 1, now), lease
elseif planner == ARGV[1] then
  left = lease
else
  return {{planner, ms(term), ms(left), ms(now)}}
end
redis.call('HSET', KEYS[1], 'planner', planner, 'term', ms(term), 'ends', ms(now + lease), 'lease', ms(lease))
redis.call('PEXPIRE', KEYS[1], math.max({TERM_TTL_MS}, lease))
return {{planner, ms(term), ms(left), ms(now)}}
"""
)
"""(planner, term, ms left, the store's ms)"""

_WHO = Script(
    f"""
-- KEYS: planner.
{_LEADER}
return {{planner, ms(term), ms(left), ms(now)}}
"""
)

_RESIGN = Script(
    f"""
-- KEYS: planner. ARGV: planner, term.
{_LEADER}
if left <= 0 or planner ~= ARGV[1] or ms(term) ~= ARGV[2] then return 0 end
-- The term stays, for the next to be larger.
redis.call('HSET', KEYS[1], 'ends', '0')
return 1
"""
)

_WRITE = Script(
    f"""
-- KEYS: planner, plan_memory, plans. ARGV: term, memory, newest, step...
{_LEADER}
if left <= 0 or ms(term) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], 'memory', ARGV[2], 'newest', ARGV[3])
redis.call('PEXPIRE', KEYS[2], {MEMORY_TTL_MS})
for i = 4, #ARGV do
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', {JOURNAL_LENGTH}, '*', 's', ARGV[i])
end
if #ARGV > 3 then redis.call('PEXPIRE', KEYS[3], {JOURNAL_TTL_MS}) end
return 1
"""
)


class RedisPlannerBoard:
    """Implements `PlannerBoard` over redis-py.

    Args:
        url: store URL.
        namespace: clusters of different namespaces share a store without seeing each other.
        timeout_s: deadline of one call.
        dry: for planners that only try out.

    Raises:
        SettingsError: malformed URL or namespace.
    """

    def __init__(self, url: str, namespace: str, *, timeout_s: float = 0.5, dry: bool = False) -> None:
        self._keys = Keys(namespace)
        self._calls = RedisCalls(url, timeout_s=timeout_s, longest_s=timeout_s)
        self._suffix = ":dry" if dry else ""

    async def lead(self, pool: PoolId, planner: str, lease_ms: int) -> Leader:
        return _leader(await self._run(_LEAD, [self._planner(pool)], [planner, lease_ms]))

    async def leader(self, pool: PoolId) -> Leader | None:
        found = _leader(await self._run(_WHO, [self._planner(pool)], []))
        return found if found.left_ms > 0 else None

    async def resign(self, pool: PoolId, planner: str, term: int) -> bool:
        return bool(await self._run(_RESIGN, [self._planner(pool)], [planner, term]))

    async def write(self, pool: PoolId, term: int, *, memory: bytes, newest: bytes, journal: Sequence[bytes]) -> bool:
        keys = [self._planner(pool), self._memory(pool), self._plans(pool)]
        async with self._calls.answer():
            if journal:
                # Another slot, hence another command; it does no harm where nothing is written then.
                await TOUCH_POOL.run(self._calls.client, [self._planned], [pool, JOURNAL_TTL_MS])
            return bool(await _WRITE.run(self._calls.client, keys, [term, memory, newest, *journal]))

    async def memory(self, pool: PoolId) -> bytes | None:
        return await self._field(pool, "memory")

    async def newest(self, pool: PoolId) -> bytes | None:
        return await self._field(pool, "newest")

    async def journal(self, pool: PoolId, limit: int) -> Sequence[bytes]:
        async with self._calls.answer():
            entries = await self._calls.client.xrevrange(self._plans(pool), count=limit)
        return [fields[b"s"] for _, fields in reversed(entries) if b"s" in fields]

    async def pools(self) -> Sequence[PoolId]:
        _, flat = await self._run(LIVE, [self._planned], [])
        return sorted(PoolId(name.decode(errors="replace")) for name in flat[0::2])

    async def close(self) -> None:
        await self._calls.close()

    async def _field(self, pool: PoolId, name: str) -> bytes | None:
        async with self._calls.answer():
            found: bytes | None = await self._calls.client.hget(self._memory(pool), name)
        return found

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[object]) -> Any:
        async with self._calls.answer():
            return await script.run(self._calls.client, keys, args)

    @property
    def _planned(self) -> str:
        return self._keys.planned + self._suffix

    def _planner(self, pool: PoolId) -> str:
        return self._keys.planner(pool) + self._suffix

    def _memory(self, pool: PoolId) -> str:
        return self._keys.plan_memory(pool) + self._suffix

    def _plans(self, pool: PoolId) -> str:
        return self._keys.plans(pool) + self._suffix


def _leader(reply: Sequence[bytes]) -> Leader:
    planner, term, left, now = reply
    return Leader(planner.decode(errors="replace"), int(term), int(left), int(now))
