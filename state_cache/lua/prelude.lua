-- put in front of every session script: names of its keys, its lifetime, and which blobs are named.
-- head: where it stands, its owner, its lease, and if it may go its ttl (ms) and when it expires (unix ms).
-- family: sessions of the lineage -> parents. named: blob -> value of epoch when it was last named. branches: their names.
local session, head, requests, family, epoch, named, branches = unpack(KEYS)
local base = ARGV[1]

local function milliseconds()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function is_over()
  local expires = tonumber(redis.call('HGET', head, 'expires') or '')
  return expires and expires <= milliseconds()
end

local function is_there()
  return redis.call('EXISTS', session) == 1 and not is_over()
end

local function prolong()
  local ttl = redis.call('HGET', head, 'ttl')
  if ttl then redis.call('HSET', head, 'expires', milliseconds() + ttl) end
end

local function blobs_missing(first)
  for i = first, #ARGV do
    if redis.call('EXISTS', base .. 'b:' .. ARGV[i]) == 0 then return true end
  end
  return false
end

local function name_blobs(first)
  local now = redis.call('GET', epoch) or '0'
  for i = first, #ARGV do
    redis.call('PERSIST', base .. 'b:' .. ARGV[i])
    redis.call('ZADD', named, now, ARGV[i])
  end
end

local function is_fenced(token, nonce)
  local fence = redis.call('HMGET', head, 'token', 'nonce')
  return fence[1] ~= token or fence[2] ~= nonce
end

-- why a keyed request may not take part in a step, if it may not
local function request_refusal(key, fingerprint)
  local known = key ~= '' and redis.call('HGET', requests, key)
  if not known then return nil end
  local request = cmsgpack.unpack(known)
  if request.fingerprint ~= fingerprint then return {'KEY_REUSED'} end
  if request.done then return {'DONE'} end
end

local function head_refusal(revision, chunk)
  local present = redis.call('HMGET', head, 'chunk', 'revision')
  if present[1] ~= chunk or present[2] ~= revision then return {'HEAD', present[1], present[2]} end
end

local function begin(record, cursor, owner, ttl, chunk, path, horizon, parent)
  redis.call('SET', session, record)
  redis.call('HSET', head, 'chunk', chunk, 'revision', '0', 'base', chunk + 1, 'path', path, 'horizon', horizon,
    'cursor', cursor, 'owner', owner)
  if ttl ~= '' then redis.call('HSET', head, 'ttl', ttl) end
  redis.call('HSET', family, string.match(session, '[^:]+$'), parent)
  prolong()
end
