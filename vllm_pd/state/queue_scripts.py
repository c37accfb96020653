"""The Lua scripts of the prefill queue. All keys of a script are of one pool, hence of one slot.

A stream entry has the fields `job` and `tokens`; everything else about a job is in its hash, whose name the scripts
make from a prefix that they are given. The hash says in which entry of which stream the job is: an entry that it does
not name is a leftover (cancelled, ended, moved) and is deleted by whoever meets it.
"""

from __future__ import annotations

from vllm_pd.state.redis_calls import Script

_GROUP = "workers"
"""The consumer group of every stream."""

_COMMON = f"""
local function gone(stream, entry)
  redis.call('XACK', stream, '{_GROUP}', entry)
  redis.call('XDEL', stream, entry)
end
local function keep(key, ms)
  if redis.call('PTTL', key) < tonumber(ms) then redis.call('PEXPIRE', key, ms) end
end
local function push(stream, job, name, tokens, ms)
  if redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, '{_GROUP}', '0', 'MKSTREAM')
  end
  local entry = redis.call('XADD', stream, '*', 'job', name, 'tokens', tokens)
  redis.call('HSET', job, 'stream', stream, 'entry', entry)
  redis.call('HDEL', job, 'claimant')
  keep(stream, ms)
end
"""

# ARGV[1..7] of every script that may give a job up.
_GIVE_UP = (
    _COMMON
    + """
local job_prefix, done_prefix = ARGV[1], ARGV[2]
local shared, dead = ARGV[3], ARGV[4]
local attempts, result_ms, longest_dead = tonumber(ARGV[5]), ARGV[6], ARGV[7]
local function name_and_tokens(stream, entry)
  local found = redis.call('XRANGE', stream, entry, entry)[1]
  if not found then return nil end
  return found[2][2], found[2][4]
end
-- Only for a job whose hash names this entry.
local function give_up(stream, entry, error)
  local name, tokens = name_and_tokens(stream, entry)
  local job = job_prefix .. name
  gone(stream, entry)
  local tried = tonumber(redis.call('HGET', job, 'attempt'))
  if tried < attempts then
    push(shared, job, name, tokens, redis.call('PTTL', job))
    return
  end
  redis.call('XADD', dead, 'MAXLEN', '~', longest_dead, '*',
    'job', name, 'tokens', tokens, 'attempts', tried, 'error', error)
  redis.call('PEXPIRE', dead, 86400000)
  redis.call('DEL', job)
  redis.call('RPUSH', done_prefix .. name, 'e' .. error)
  redis.call('PEXPIRE', done_prefix .. name, result_ms)
end
local function names(job, entry) return redis.call('HGET', job, 'entry') == entry end
"""
)

# ARGV[1..2] of a script about a claim: entry, claimant. KEYS[1..2]: stream, job.
_OWNED = """
local held = redis.call('HMGET', KEYS[2], 'entry', 'claimant', 'stream')
local owned = held[1] == ARGV[1] and held[2] == ARGV[2] and held[3] == KEYS[1]
"""

PUT = Script(
    _COMMON
    + """
-- KEYS: stream, job, done. ARGV: name, tokens, payload, ttl ms, longest stream, job prefix.
if redis.call('EXISTS', KEYS[2]) == 1 or redis.call('EXISTS', KEYS[3]) == 1 then return 'known' end
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[5]) then
  -- Jobs that ended before anybody claimed them are still counted; the oldest end first.
  for _, each in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 64)) do
    if redis.call('HGET', ARGV[6] .. each[2][2], 'entry') ~= each[1] then gone(KEYS[1], each[1]) end
  end
  if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[5]) then return 'full' end
end
redis.call('HSET', KEYS[2], 'payload', ARGV[3], 'attempt', 0)
redis.call('PEXPIRE', KEYS[2], ARGV[4])
push(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[4])
return 'put'
"""
)
"""Add a job; answers `put`, `known` or `full`."""

CLAIM = Script(
    _COMMON
    + f"""
-- KEYS: stream... in order of preference. ARGV: job prefix, claimant, visibility ms.
for i, stream in ipairs(KEYS) do
  while redis.call('EXISTS', stream) == 1 do
    local read = redis.call('XREADGROUP', 'GROUP', '{_GROUP}', ARGV[2], 'COUNT', 1, 'STREAMS', stream, '>')
    if not read then break end
    local entry, fields = read[1][2][1][1], read[1][2][1][2]
    local job = ARGV[1] .. fields[2]
    if redis.call('HGET', job, 'entry') == entry then
      local attempt = redis.call('HINCRBY', job, 'attempt', 1)
      redis.call('HSET', job, 'claimant', ARGV[2])
      keep(job, 4 * ARGV[3])
      keep(stream, 4 * ARGV[3])
      return {{i, entry, fields[2], fields[4], attempt, redis.call('HGET', job, 'payload')}}
    end
    gone(stream, entry)
  end
end
local last = {{0}}
for i, stream in ipairs(KEYS) do
  local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  last[i + 1] = newest and newest[1] or '0-0'
end
return last
"""
)
"""Claim a job; answers (number of its stream, entry, name, tokens, attempt, payload), or 0 and the newest entry of each
stream: whatever comes after these was not seen."""

EXTEND = Script(
    _COMMON
    + _OWNED
    + f"""
-- ARGV: entry, claimant, visibility ms.
if not owned then return 0 end
keep(KEYS[2], 4 * ARGV[3])
keep(KEYS[1], 4 * ARGV[3])
return #redis.call('XCLAIM', KEYS[1], '{_GROUP}', ARGV[2], 0, ARGV[1], 'JUSTID')
"""
)
"""Restart a claim's time; answers 1, or 0 when it is no longer the claimant's."""

ACK = Script(
    _COMMON
    + _OWNED
    + """
-- KEYS: stream, job, done. ARGV: entry, claimant, result, its ttl ms.
if not owned then return 0 end
gone(KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
redis.call('RPUSH', KEYS[3], 'd' .. ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return 1
"""
)
"""End a claim with a result; answers 1, or 0 when it is no longer the claimant's."""

FAIL = Script(
    _GIVE_UP
    + """
-- KEYS: stream, job, shared, dead. ARGV: the seven of giving up, entry, claimant, error.
local held = redis.call('HMGET', KEYS[2], 'entry', 'claimant', 'stream')
if held[1] ~= ARGV[8] or held[2] ~= ARGV[9] or held[3] ~= KEYS[1] then return 0 end
give_up(KEYS[1], ARGV[8], ARGV[10])
return 1
"""
)
"""End a claim with an error; answers 1, or 0 when it is no longer the claimant's."""

CANCEL = Script(
    _COMMON
    + """
-- KEYS: job.
local held = redis.call('HMGET', KEYS[1], 'stream', 'entry')
if not held[1] then return 0 end
gone(held[1], held[2])
redis.call('DEL', KEYS[1])
return 1
"""
)
"""Forget a job; answers 1 if it was there."""

RECLAIM = Script(
    _GIVE_UP
    + f"""
-- KEYS: stream, shared, dead. ARGV: the seven of giving up, visibility ms, most.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local given = 0
for _, each in ipairs(redis.call('XPENDING', KEYS[1], '{_GROUP}', 'IDLE', ARGV[8], '-', '+', ARGV[9])) do
  local entry = each[1]
  local name = name_and_tokens(KEYS[1], entry)
  if name and names(job_prefix .. name, entry) then
    give_up(KEYS[1], entry, each[2] .. ' said nothing for ' .. each[3] .. ' ms')
    given = given + 1
  else
    gone(KEYS[1], entry)
  end
end
return given
"""
)
"""Give up claims whose workers said nothing; answers how many."""

REHOME = Script(
    _GIVE_UP
    + """
-- KEYS: stream, shared, dead. ARGV: the seven of giving up, worker, most.
local moved = 0
for _, each in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[9])) do
  local entry, name, tokens = each[1], each[2][2], each[2][4]
  local job = job_prefix .. name
  if not names(job, entry) then
    gone(KEYS[1], entry)
  else
    local claimant = redis.call('HGET', job, 'claimant')
    if not claimant then
      gone(KEYS[1], entry)
      push(shared, job, name, tokens, redis.call('PTTL', job))
      moved = moved + 1
    elseif claimant == ARGV[8] then
      give_up(KEYS[1], entry, ARGV[8] .. ' is gone')
      moved = moved + 1
    end
  end
end
return moved
"""
)
"""Empty the stream of a worker that is gone, but for what others claimed from it; answers how many jobs it had."""

DEPTH = Script(
    """
-- KEYS: stream... ARGV: job prefix.
local out = {}
for _, stream in ipairs(KEYS) do
  local counts = {0, 0, 0, 0}
  for _, each in ipairs(redis.call('XRANGE', stream, '-', '+')) do
    local held = redis.call('HMGET', ARGV[1] .. each[2][2], 'entry', 'claimant')
    if held[1] == each[1] then
      local at = held[2] and 3 or 1
      counts[at] = counts[at] + 1
      counts[at + 1] = counts[at + 1] + each[2][4]
    end
  end
  out[#out + 1] = counts
end
return out
"""
)
"""(waiting jobs, their tokens, claimed jobs, their tokens) of each stream."""
