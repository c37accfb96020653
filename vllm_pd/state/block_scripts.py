"""The Lua scripts of the block index. All keys of a script are of one pool, hence of one slot.

Each that writes first compares the number of the newest stored change with what its writer believes: whatever made
the store forget or go back (restart, failover, eviction, another process) shows there, and nothing is written.
"""

from __future__ import annotations

from vllm_pd.state.redis_calls import Script

BEGIN = Script(
    """
-- KEYS: cache, events, caches. ARGV: stored seq or '', seq, generation, lifetime ms, cache name, longest stream, entry.
if (redis.call('HGET', KEYS[1], 'seq') or '') ~= ARGV[1] then return 0 end
local t = redis.call('TIME')
local ends = t[1] * 1000 + math.floor(t[2] / 1000) + tonumber(ARGV[4])
redis.call('HSET', KEYS[1], 'gen', ARGV[3], 'seq', ARGV[2], 'slabs', 0, 'digests', string.char(128))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('ZADD', KEYS[3], string.format('%.0f', ends), ARGV[5])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[6], '*', 'c', ARGV[7])
for i = 2, 3 do
  if redis.call('PTTL', KEYS[i]) < tonumber(ARGV[4]) then redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
end
return 1
"""
)
"""Start an empty generation of a cache; answers 0 when the stored change is another than expected, else 1."""

WRITE = Script(
    """
-- KEYS: cache, events, slab... ARGV: stored seq, seq, slabs, digests, bytes of a slab, lifetime ms, longest stream,
-- number of entries, entry..., then for each slab: '1' if new, number of stretches, (offset, bytes)...
if redis.call('HGET', KEYS[1], 'seq') ~= ARGV[1] then return 0 end
local size, entries = tonumber(ARGV[5]), tonumber(ARGV[8])
local at = 9 + entries
for i = 3, #KEYS do
  if ARGV[at] ~= '1' and redis.call('STRLEN', KEYS[i]) ~= size then return 0 end
  at = at + 2 + 2 * ARGV[at + 1]
end
redis.call('HSET', KEYS[1], 'seq', ARGV[2], 'slabs', ARGV[3], 'digests', ARGV[4])
at = 9 + entries
for i = 3, #KEYS do
  if ARGV[at] == '1' then
    -- Its whole length at once is an allocation of just that length.
    redis.call('DEL', KEYS[i])
    redis.call('SETRANGE', KEYS[i], size - 1, string.char(0))
    redis.call('PEXPIRE', KEYS[i], ARGV[6])
  end
  local last = at + 2 * ARGV[at + 1]
  for j = at + 2, last, 2 do redis.call('SETRANGE', KEYS[i], ARGV[j], ARGV[j + 1]) end
  at = last + 2
end
for i = 9, 8 + entries do redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[7], '*', 'c', ARGV[i]) end
if redis.call('PTTL', KEYS[2]) < 0 then redis.call('PEXPIRE', KEYS[2], ARGV[6]) end
return 1
"""
)
"""Changes of a cache and their entries in the stream; answers 0 when the store does not hold what was written."""

RENEW = Script(
    """
-- KEYS: cache, events, caches, slab... ARGV: stored seq, lifetime ms, cache name.
if redis.call('HGET', KEYS[1], 'seq') ~= ARGV[1] then return 0 end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function ms(n) return string.format('%.0f', n) end
for i = 4, #KEYS do
  if redis.call('PEXPIRE', KEYS[i], ARGV[2]) == 0 then return 0 end
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[3], ms(now + tonumber(ARGV[2])), ARGV[3])
local dead = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', ms(now), 'LIMIT', 0, 64)
if #dead > 0 then redis.call('ZREM', KEYS[3], unpack(dead)) end
for i = 2, 3 do
  if redis.call('PTTL', KEYS[i]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[i], ARGV[2]) end
end
return 1
"""
)
"""Prolong a cache's life, and of its slabs those that are named; answers 0 when one of them is gone."""

REMOVE = Script(
    """
-- KEYS: cache, events, caches. ARGV: stored seq, cache name, lifetime ms, longest stream, entry.
if redis.call('HGET', KEYS[1], 'seq') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[3], ARGV[2])
-- A full store refuses the entry, and may: readers also learn from the registry who is gone.
redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'c', ARGV[5])
if redis.call('PTTL', KEYS[2]) < 0 then redis.call('PEXPIRE', KEYS[2], ARGV[3]) end
return 1
"""
)
"""End a cache; answers 0 when the stored change is another than expected."""
