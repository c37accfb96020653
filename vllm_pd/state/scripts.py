"""The Lua scripts of the registry, of wanted roles and of demand reports. Each touches keys of one slot only and reads
the time from the store.
"""

from vllm_pd.state.redis_calls import Script

_NOW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function ms(n) return string.format('%.0f', n) end
"""

# Bounded, so that one call never does the work of a thousand dead members. A replica refuses to remove, and may:
# whoever reads leaves out the dead ones anyway.
_DROP_EXPIRED = """
local dead = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ms(now), 'LIMIT', 0, 64)
if #dead > 0 then redis.pcall('ZREM', KEYS[1], unpack(dead)) end
"""

# The set outlives its last lease by nothing: a pool that nobody visits again leaves no key behind.
_KEEP_SET = """
if redis.call('PTTL', KEYS[1]) < lease then redis.call('PEXPIRE', KEYS[1], lease) end
"""

# Fields are `<end ms>:...`; what is no such thing stays for whoever reads to complain about.
_DROP_ENDED_FIELDS = """
if redis.call('HLEN', KEYS[1]) > 1 then
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    local ends = tonumber(string.match(all[i + 1], '^(%d+):'))
    if ends and ends <= now then redis.call('HDEL', KEYS[1], all[i]) end
  end
end
"""

HEARTBEAT = Script(
    """
-- KEYS: workers, worker, load. ARGV: id, epoch, lease ms, record.
"""
    + _NOW
    + """
local lease = tonumber(ARGV[3])
local stored = redis.call('HGET', KEYS[2], 'epoch')
-- What is no number is no start of ours, and gives way.
if stored and (tonumber(stored) or 0) > tonumber(ARGV[2]) then return 'stale' end
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
local renewed = stored == ARGV[2] and ends and tonumber(ends) > now
-- What an earlier start of this worker said about its load is not this one's load.
if stored and stored ~= ARGV[2] then redis.call('DEL', KEYS[3]) end
redis.call('HSET', KEYS[2], 'epoch', ARGV[2], 'record', ARGV[4])
redis.call('PEXPIRE', KEYS[2], lease)
redis.call('ZADD', KEYS[1], ms(now + lease), ARGV[1])
"""
    + _DROP_EXPIRED
    + _KEEP_SET
    + """
return renewed and 'renewed' or 'new'
"""
)
"""Register or renew; answers `new`, `renewed` or `stale`."""

TOUCH_POOL = Script(
    """
-- KEYS: pools. ARGV: pool, lease ms.
"""
    + _NOW
    + """
local lease = tonumber(ARGV[2])
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not ends or tonumber(ends) < now + lease then redis.call('ZADD', KEYS[1], ms(now + lease), ARGV[1]) end
"""
    + _DROP_EXPIRED
    + _KEEP_SET
)
"""Keep a pool in the directory for at least one lease."""

LIVE = Script(
    """
-- KEYS: a ZSET of member -> end, ms.
"""
    + _NOW
    + _DROP_EXPIRED
    + """
return {ms(now), redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ms(now), '+inf', 'WITHSCORES')}
"""
)
"""The store's time in ms and the members whose end is in the future, each followed by its end."""

PUBLISH = Script(
    """
-- KEYS: a HASH of writer -> '<end ms>:<payload>'. ARGV: writer, ttl ms, payload.
"""
    + _NOW
    + """
local lease = tonumber(ARGV[2])
redis.call('HSET', KEYS[1], ARGV[1], ms(now + lease) .. ':' .. ARGV[3])
"""
    + _KEEP_SET
    + _DROP_ENDED_FIELDS
)
"""Replace what one writer says. Each field has an end of its own: the key lives as long as its liveliest writer."""

WITHDRAW = Script("""
-- KEYS: workers, worker, load. ARGV: id, epoch.
if redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('ZREM', KEYS[1], ARGV[1])
return 1
""")
"""Remove a worker if the epoch is the stored one; answers 1 if it did."""

SET_ROLE = Script(
    """
-- KEYS: roles, planner. ARGV: worker, epoch, ttl ms, the rest of the wish from its role on, who wishes, the term of a
-- planner or ''; then for each kind of which somebody must stay: the role that takes one away from it, how many may
-- stay, and worker and epoch of each.
"""
    + _NOW
    + """
local lease = tonumber(ARGV[3])
local function wish(worker)
  local stored = redis.call('HGET', KEYS[1], worker) or ''
  local ends, epoch, role, by = string.match(stored, '^(%d+):(%d+):(%a+):%d+:([^:]*):')
  if ends and tonumber(ends) > now then return tonumber(epoch), role, by end
end
local epoch, _, by = wish(ARGV[1])
if epoch and epoch > tonumber(ARGV[2]) then return 'old' end
if ARGV[6] ~= '' then
  if (tonumber(redis.call('HGET', KEYS[2], 'term')) or 0) > tonumber(ARGV[6]) then return 'deposed' end
  if epoch == tonumber(ARGV[2]) and by ~= '' and by ~= ARGV[5] then return 'held' end
end
local at = 7
while at <= #ARGV do
  local away, last = ARGV[at], at + 1 + 2 * tonumber(ARGV[at + 1])
  local stays = false
  for i = at + 2, last, 2 do
    local wished, role = wish(ARGV[i])
    if not wished or wished < tonumber(ARGV[i + 1]) or role ~= away then
      stays = true
      break
    end
  end
  if not stays then return 'last' end
  at = last + 1
end
redis.call('HSET', KEYS[1], ARGV[1], ms(now + lease) .. ':' .. ARGV[2] .. ':' .. ARGV[4])
"""
    + _KEEP_SET
    + _DROP_ENDED_FIELDS
    + """
return 'wished'
"""
)
"""Wish for a role, unless something speaks against it; answers a `Wished`."""

CLEAR_ROLE = Script("""
-- KEYS: roles. ARGV: worker, epoch, id or ''.
local epoch, rest = string.match(redis.call('HGET', KEYS[1], ARGV[1]) or '', '^%d+:(%d+):(.*)$')
if epoch ~= ARGV[2] then return 0 end
if ARGV[3] ~= '' and string.match(rest, '^%a+:%d+:[^:]*:(.*)$') ~= ARGV[3] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
""")
"""Take a wish back if it is for this epoch, and this one; answers 1 if it did."""

FIELD = Script(
    """
-- KEYS: a HASH. ARGV: a field.
"""
    + _NOW
    + """
return {ms(now), redis.call('HGET', KEYS[1], ARGV[1])}
"""
)
"""The store's time in ms and one field's value."""

FIND = Script(
    """
-- KEYS: workers, worker, load. ARGV: id.
"""
    + _NOW
    + """
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not ends or tonumber(ends) <= now then return {} end
local record = redis.call('HGET', KEYS[2], 'record')
if not record then return {} end
return {ms(now), ends, record, redis.call('HGETALL', KEYS[3])}
"""
)
"""The store's time, the end of a worker's lease, its record and its load; nothing when it is not alive."""

FIELDS = Script(
    """
-- KEYS: a HASH.
"""
    + _NOW
    + """
return {ms(now), redis.call('HGETALL', KEYS[1])}
"""
)
"""The store's time in ms and all fields, each followed by its value."""
