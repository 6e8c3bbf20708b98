-- put in front of every session script: names of its keys, and the books on who names which blob.
-- held: blob -> records of this session that name it. kin: blob -> sessions of the lineage that name it.
local session, head, chunks, snapshots, requests, held, kin = unpack(KEYS)
local blob_prefix = ARGV[1]

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

local function snapshot_blobs(index)
  local record = redis.call('HGET', snapshots, index)
  return record and cmsgpack.unpack(record).blobs or {}
end

local function is_fenced(token, nonce)
  local fence = redis.call('HMGET', head, 'token', 'nonce')
  return fence[1] ~= token or fence[2] ~= nonce
end
