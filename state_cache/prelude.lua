-- put in front of every session script: names of its keys, its lifetime, and the books on who names which blob.
-- head: where it stands, its owner, and if it may go its ttl (ms) and when it expires (unix ms).
-- held: blob -> records of this session that name it. kin: blob -> sessions of the lineage that name it.
local session, head, chunks, snapshots, requests, held, kin = unpack(KEYS)
local blob_prefix = ARGV[1]

local function milliseconds()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function is_over()
  local expires = redis.call('HGET', head, 'expires')
  return expires and tonumber(expires) <= milliseconds()
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
    if redis.call('EXISTS', blob_prefix .. ARGV[i]) == 0 then return true end
  end
  return false
end

local function retain(name)
  if redis.call('HINCRBY', held, name, 1) > 1 then return end
  redis.call('HINCRBY', kin, name, 1)
  redis.call('PERSIST', blob_prefix .. name)
end

local function leave(name)
  if redis.call('HINCRBY', kin, name, -1) > 0 then return end
  redis.call('HDEL', kin, name)
  redis.call('UNLINK', blob_prefix .. name)
end

local function release(name)
  if redis.call('HINCRBY', held, name, -1) > 0 then return end
  redis.call('HDEL', held, name)
  leave(name)
end

local function drop()
  for _, name in ipairs(redis.call('HKEYS', held)) do leave(name) end
  redis.call('UNLINK', session, head, chunks, snapshots, requests, held)
end

local function snapshot_blobs(index)
  local record = redis.call('HGET', snapshots, index)
  return record and cmsgpack.unpack(record).blobs or {}
end

local function is_fenced(token, nonce)
  local fence = redis.call('HMGET', head, 'token', 'nonce')
  return fence[1] ~= token or fence[2] ~= nonce
end
