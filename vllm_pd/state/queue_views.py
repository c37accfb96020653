"""The Lua scripts that look at the prefill queue, for people and metrics. See `queue_scripts`."""

from __future__ import annotations

from vllm_pd.state.queue_scripts import COMMON
from vllm_pd.state.redis_calls import Script

_INFO = (
    COMMON
    + """
local function info(f, held)
  local stream = held[1] == SHARED and '' or string.sub(held[1], #SHARED + 2)
  return {f[2], stream, f[4], f[6], f[8], math.max(0, now - f[10]), redis.call('PTTL', JOB .. f[2]),
    tonumber(held[3]), held[4] or ''}
end
"""
)

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

STREAMS = Script(
    COMMON
    + """
-- KEYS: owners.
local out = {}
for _, worker in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('XLEN', SHARED .. ':' .. worker) > 0 or redis.call('EXISTS', CLAIMS .. worker) == 1 then
    out[#out + 1] = worker
  else
    redis.call('SREM', KEYS[1], worker)
  end
end
return out
"""
)
"""The workers that have a stream with something in it, or claims."""

JOBS = Script(
    _INFO
    + """
-- KEYS: stream... ARGV: most.
local out, left = {}, tonumber(ARGV[16])
for _, stream in ipairs(KEYS) do
  if left <= 0 then break end
  for _, each in ipairs(redis.call('XRANGE', stream, '-', '+', 'COUNT', left)) do
    local held = redis.call('HMGET', JOB .. each[2][2], 'stream', 'entry', 'attempt', 'claimant')
    if held[2] == each[1] then
      out[#out + 1] = info(each[2], held)
      left = left - 1
    end
  end
end
return out
"""
)
"""What `JobInfo` needs of the oldest jobs of each stream."""

PEEK = Script(
    _INFO
    + """
-- KEYS: job.
local held = redis.call('HMGET', KEYS[1], 'stream', 'entry', 'attempt', 'claimant')
local f = held[1] and fields(held[1], held[2])
if not f then return {} end
return {info(f, held), redis.call('HGET', KEYS[1], 'payload')}
"""
)
"""What `JobInfo` needs of a job, and its payload; nothing if it is not there."""
