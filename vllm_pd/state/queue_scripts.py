"""The Lua scripts of the prefill queue. All keys of a script are of one pool, hence of one slot.

A stream entry has the fields `job`, `tokens`, `order`, `router` and `at`, in that order, which do not change during the
job's life; everything else is in the job's hash. The hash says in which entry of which stream the job is: an entry that
it does not name is a leftover (cancelled, ended, moved) and is deleted by whoever meets it. A claimed entry is in the
pending list of the stream's group, which knows how long nothing was said about it; the hash says whose it is.

Every script begins with the same arguments (`COMMON_ARGS`), which give it the names of keys and the limits.
"""

from __future__ import annotations

from vllm_pd.state.redis_calls import Script

COMMON_ARGS = 15
"""How many arguments every script begins with."""

COMMON = """
-- The group of every stream. It has one consumer, `all`: consumers of workers that are gone would stay for ever.
local GROUP = 'workers'
local JOB, DONE, RESULTS, ROUTER, CLAIMS, CANCELLED = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local SHARED, OWNERS, DEAD = ARGV[7], ARGV[8], ARGV[9]
local ATTEMPTS, VISIBILITY, PATIENCE = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local SILENCE, RESULT_MS, DEAD_LETTERS = tonumber(ARGV[13]), ARGV[14], ARGV[15]
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function gone(stream, entry)
  redis.call('XACK', stream, GROUP, entry)
  redis.call('XDEL', stream, entry)
end
local function keep(key, ms)
  if redis.call('PTTL', key) < tonumber(ms) then redis.call('PEXPIRE', key, ms) end
end
local function own(worker, ms)
  redis.call('SADD', OWNERS, worker)
  keep(OWNERS, ms)
end
-- f: the fields of an entry, names and values in turn.
local function fields(stream, entry)
  local found = redis.call('XRANGE', stream, entry, entry)[1]
  return found and found[2]
end
local function push(stream, f, ms)
  if redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  end
  local entry = redis.call('XADD', stream, '*', unpack(f))
  redis.call('HSET', JOB .. f[2], 'stream', stream, 'entry', entry)
  redis.call('HDEL', JOB .. f[2], 'claimant', 'worker')
  keep(stream, ms)
  if stream ~= SHARED then own(string.sub(stream, #SHARED + 2), ms) end
end
-- The job is over; `mark` stays so that it is not put again.
local function over(f, mark, worker, kind, data)
  redis.call('DEL', JOB .. f[2])
  redis.call('SET', DONE .. f[2], mark, 'PX', RESULT_MS)
  if worker then redis.call('HDEL', CLAIMS .. worker, f[2]) end
  if f[8] ~= '' then
    redis.call('XADD', RESULTS .. f[8], 'MAXLEN', '~', 10000, '*',
      'job', f[2], 'worker', worker or '', 'kind', kind, 'data', data)
    redis.call('PEXPIRE', RESULTS .. f[8], RESULT_MS)
  end
end
-- Nobody waits for the job: its router says nothing (any more).
local function forsaken(f)
  return f[8] ~= '' and now - f[10] >= SILENCE and redis.call('EXISTS', ROUTER .. f[8]) == 0
end
local function drop(stream, entry, f, worker)
  gone(stream, entry)
  over(f, 'e', worker, 'e', 'its router said nothing for ' .. SILENCE .. ' ms')
end
-- Only for a claimed job whose hash names this entry.
local function give_up(stream, entry, f, worker, error)
  local job = JOB .. f[2]
  gone(stream, entry)
  local tried = tonumber(redis.call('HGET', job, 'attempt'))
  if tried < ATTEMPTS then
    redis.call('HDEL', CLAIMS .. worker, f[2])
    redis.call('HSET', job, 'failed', worker)
    push(SHARED, f, redis.call('PTTL', job))
    return
  end
  redis.call('XADD', DEAD, 'MAXLEN', '~', DEAD_LETTERS, '*',
    'job', f[2], 'tokens', f[4], 'attempts', tried, 'error', error)
  redis.call('PEXPIRE', DEAD, 86400000)
  over(f, 'e', worker, 'e', error)
end
-- Give up what a worker's starts before `epoch` have claimed, wherever; returns how many.
local function give_up_claims(worker, epoch, most, error)
  local claims, given = redis.call('HGETALL', CLAIMS .. worker), 0
  for i = 1, #claims, 2 do
    if given < most and tonumber(claims[i + 1]) < epoch then
      local held = redis.call('HMGET', JOB .. claims[i], 'stream', 'entry', 'claimant')
      local f = held[3] == worker .. '@' .. claims[i + 1] and fields(held[1], held[2])
      if f then
        give_up(held[1], held[2], f, worker, error)
        given = given + 1
      else
        redis.call('HDEL', CLAIMS .. worker, claims[i])
      end
    end
  end
  return given
end
"""

# A script about a claim: KEYS: stream, job. ARGV[16..18]: entry, claimant, its worker.
_OWNED = """
local ENTRY, CLAIMANT, WORKER = ARGV[16], ARGV[17], ARGV[18]
local held = redis.call('HMGET', KEYS[2], 'entry', 'claimant', 'stream')
local f = held[1] == ENTRY and held[2] == CLAIMANT and held[3] == KEYS[1] and fields(KEYS[1], ENTRY)
"""

PUT = Script(
    COMMON
    + """
-- KEYS: stream, job, done. ARGV: name, tokens, order, router, payload, ttl ms, longest stream.
if redis.call('EXISTS', KEYS[2]) == 1 or redis.call('EXISTS', KEYS[3]) == 1 then return 'known' end
local longest = tonumber(ARGV[22])
if redis.call('XLEN', KEYS[1]) >= longest then
  -- Jobs that ended before anybody claimed them are still counted; the oldest end first.
  for _, each in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 64)) do
    local f = each[2]
    local held = redis.call('HMGET', JOB .. f[2], 'entry', 'worker')
    if held[1] ~= each[1] then gone(KEYS[1], each[1])
    elseif not held[2] and forsaken(f) then drop(KEYS[1], each[1], f) end
  end
  if redis.call('XLEN', KEYS[1]) >= longest then return 'full' end
end
redis.call('HSET', KEYS[2], 'payload', ARGV[20], 'attempt', 0)
redis.call('PEXPIRE', KEYS[2], ARGV[21])
push(KEYS[1], {'job', ARGV[16], 'tokens', ARGV[17], 'order', ARGV[18], 'router', ARGV[19], 'at', now}, ARGV[21])
return 'put'
"""
)
"""Add a job; answers `put`, `known` or `full`."""

CLAIM = Script(
    COMMON
    + """
-- KEYS: own stream, shared one, perhaps another's. ARGV: claimant, its worker, its epoch, fits, key of the worker, name
-- of this claim, names of earlier ones whose answers were lost, with a space before and after each, or ''.
local CLAIMANT, WORKER, EPOCH, FITS = ARGV[16], ARGV[17], ARGV[18], tonumber(ARGV[19])
local NAME, LOST = ARGV[21], ARGV[22]
local function answer(i, entry, f)
  local held = redis.call('HMGET', JOB .. f[2], 'attempt', 'payload', 'claim')
  return {i, entry, f[2], f[4], f[6], f[8], tonumber(held[1]), held[2], held[3]}
end
if LOST ~= '' then
  for _, name in ipairs(redis.call('HKEYS', CLAIMS .. WORKER)) do
    local held = redis.call('HMGET', JOB .. name, 'claim', 'claimant', 'stream', 'entry')
    if held[1] and held[2] == CLAIMANT and string.find(LOST, ' ' .. held[1] .. ' ', 1, true) then
      for i = 1, #KEYS do
        local f = KEYS[i] == held[3] and fields(held[3], held[4])
        if f then return answer(i, held[4], f) end
      end
    end
  end
end
local function waiting(first, last)
  local found = {}
  for i = first, last do
    if redis.call('EXISTS', KEYS[i]) == 1 then
      local claimed = redis.call('XPENDING', KEYS[i], GROUP)[1]
      for _, each in ipairs(redis.call('XRANGE', KEYS[i], '-', '+', 'COUNT', 64 + claimed)) do
        if each[2][10] then found[#found + 1] = {i, each[1], each[2], #found} else gone(KEYS[i], each[1]) end
      end
    end
  end
  -- The position is in the order of streams, then of arrival.
  table.sort(found, function(a, b)
    if a[3][6] == b[3][6] then return a[4] < b[4] end
    return a[3][6] < b[3][6]
  end)
  return found
end
-- Answers the claim; or nothing, and whether a job waits that nothing may overtake.
local function claim(first, last)
  for _, each in ipairs(waiting(first, last)) do
    local stream, entry, f = KEYS[each[1]], each[2], each[3]
    local job = JOB .. f[2]
    local held = redis.call('HMGET', job, 'entry', 'claimant', 'failed')
    if held[1] ~= entry then
      gone(stream, entry)
    elseif not held[2] then
      if forsaken(f) then
        drop(stream, entry, f)
      elseif FITS >= 0 and tonumber(f[4]) > FITS then
        if now - f[10] >= PATIENCE then return nil, true end
      elseif held[3] ~= WORKER or now - string.match(entry, '^%d+') >= PATIENCE then
        redis.call('HINCRBY', job, 'attempt', 1)
        redis.call('HSET', job, 'claimant', CLAIMANT, 'worker', WORKER, 'claim', NAME)
        redis.call('XCLAIM', stream, GROUP, 'all', 0, entry, 'FORCE', 'JUSTID')
        redis.call('HSET', CLAIMS .. WORKER, f[2], EPOCH)
        for _, key in ipairs({job, stream, CLAIMS .. WORKER}) do keep(key, 4 * VISIBILITY) end
        own(WORKER, 4 * VISIBILITY)
        return answer(each[1], entry, f)
      end
    end
  end
end
local newest = redis.call('HGET', ARGV[20], 'epoch')
if not newest or tonumber(newest) <= tonumber(EPOCH) then
  local found, blocked = claim(1, 2)
  if not found and not blocked and KEYS[3] then found = claim(3, 3) end
  if found then return found end
end
local last = {0}
for i = 1, 2 do
  local newest = redis.call('XREVRANGE', KEYS[i], '+', '-', 'COUNT', 1)[1]
  last[i + 1] = newest and newest[1] or '0-0'
end
return last
"""
)
"""Claim a job; answers (number of its stream, entry, name, tokens, order, router, attempt, payload, name of the claim),
or 0 and the newest entry of the first two streams: whatever comes after these was not seen. A job that an earlier claim
got, and whose answer was lost, is answered again."""

EXTEND = Script(
    COMMON
    + _OWNED
    + """
if not f then return 0 end
if forsaken(f) then drop(KEYS[1], ENTRY, f, WORKER) return 0 end
for _, key in ipairs({KEYS[1], KEYS[2], CLAIMS .. WORKER}) do keep(key, 4 * VISIBILITY) end
own(WORKER, 4 * VISIBILITY)
redis.call('XCLAIM', KEYS[1], GROUP, 'all', 0, ENTRY, 'JUSTID')
return 1
"""
)
"""Restart a claim's time; answers 1, or 0 when it is no longer the claimant's."""

ACK = Script(
    COMMON
    + _OWNED
    + """
-- ARGV: entry, claimant, worker, done, result.
local mark = 'd' .. ENTRY .. ' ' .. CLAIMANT
if not f then return redis.call('GET', ARGV[19]) == mark and 1 or 0 end
gone(KEYS[1], ENTRY)
over(f, mark, WORKER, 'd', ARGV[20])
return 1
"""
)
"""End a claim with a result; answers 1, also when it did so before, or 0 when it is no longer the claimant's."""

FAIL = Script(
    COMMON
    + _OWNED
    + """
-- ARGV: entry, claimant, worker, error.
if not f then return 0 end
give_up(KEYS[1], ENTRY, f, WORKER, ARGV[19])
return 1
"""
)
"""End a claim with an error; answers 1, or 0 when it is no longer the claimant's."""

RELEASE = Script(
    COMMON
    + _OWNED
    + """
if not f then return 0 end
gone(KEYS[1], ENTRY)
redis.call('HDEL', CLAIMS .. WORKER, f[2])
redis.call('HINCRBY', KEYS[2], 'attempt', -1)
push(SHARED, f, redis.call('PTTL', KEYS[2]))
return 1
"""
)
"""Undo a claim; answers 1, or 0 when it is no longer the claimant's."""

CANCEL = Script(
    COMMON
    + """
-- KEYS: job, done. ARGV: name, error.
local held = redis.call('HMGET', KEYS[1], 'stream', 'entry', 'claimant', 'worker')
redis.call('SET', KEYS[2], 'c', 'NX', 'PX', RESULT_MS)
if not held[1] then return 0 end
local f = ARGV[17] ~= '' and fields(held[1], held[2])
gone(held[1], held[2])
if f then over(f, 'c', held[4], 'e', ARGV[17]) end
redis.call('DEL', KEYS[1])
if held[3] then
  redis.call('HDEL', CLAIMS .. held[4], ARGV[16])
  redis.call('XADD', CANCELLED .. held[3], 'MAXLEN', '~', 1000, '*', 'job', ARGV[16])
  redis.call('PEXPIRE', CANCELLED .. held[3], RESULT_MS)
end
return 1
"""
)
"""Forget a job, or end it with an error; answers 1 if it was there."""

RECLAIM = Script(
    COMMON
    + """
-- KEYS: stream. ARGV: most.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local given = 0
for _, each in ipairs(redis.call('XPENDING', KEYS[1], GROUP, 'IDLE', VISIBILITY, '-', '+', ARGV[16])) do
  local entry = each[1]
  local f = fields(KEYS[1], entry)
  local held = f and redis.call('HMGET', JOB .. f[2], 'entry', 'worker')
  if held and held[1] == entry and held[2] then
    give_up(KEYS[1], entry, f, held[2], held[2] .. ' said nothing for ' .. each[3] .. ' ms')
    given = given + 1
  else
    gone(KEYS[1], entry)
  end
end
return given
"""
)
"""Give up claims whose workers said nothing; answers how many."""

TAKEOVER = Script(
    COMMON
    + """
-- KEYS: claims. ARGV: worker, epoch, most.
return give_up_claims(ARGV[16], tonumber(ARGV[17]), tonumber(ARGV[18]), ARGV[16] .. ' was restarted')
"""
)
"""Give up what earlier starts of a worker have claimed; answers how many."""

REHOME = Script(
    COMMON
    + """
-- KEYS: stream. ARGV: worker, most, whether its claims too.
local moved = 0
if ARGV[18] == '1' then
  moved = give_up_claims(ARGV[16], math.huge, tonumber(ARGV[17]), ARGV[16] .. ' is gone')
end
if redis.call('EXISTS', KEYS[1]) == 0 then return moved end
-- What others have claimed from it stays, and may stand first.
local claimed = redis.call('XPENDING', KEYS[1], GROUP)[1]
local entries = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[17] + claimed)
local waiting = 0
for _, each in ipairs(entries) do
  local entry, f = each[1], each[2]
  local held = redis.call('HMGET', JOB .. f[2], 'entry', 'worker')
  if held[1] ~= entry then
    gone(KEYS[1], entry)
  elseif not held[2] and waiting < tonumber(ARGV[17]) then
    gone(KEYS[1], entry)
    push(SHARED, f, redis.call('PTTL', JOB .. f[2]))
    waiting = waiting + 1
  end
end
return moved + waiting
"""
)
"""Empty the stream of a worker that is gone, but for what others claimed from it, and perhaps give up its claims;
answers how many jobs it had."""
