-- ARGV 2 token, 3 nonce, 4 revision, 5 expected head, 6 head afterwards, 7 cursor, 8 chunk record, 9 snapshot,
-- 10 idempotency key, 11 request fingerprint, 12 request record, 13… blobs that chunk and snapshot name; '' stands for none
local after, chunk, snapshot, key = ARGV[6], ARGV[8], ARGV[9], ARGV[10]

if not is_there() then return {'NOT_FOUND'} end
local known = key ~= '' and redis.call('HGET', requests, key)
if known then
  local request = cmsgpack.unpack(known)
  if request.fingerprint ~= ARGV[11] then return {'KEY_REUSED'} end
  if request.done then return {'DONE'} end
end
if is_fenced(ARGV[2], ARGV[3]) then return {'FENCED'} end
local present = redis.call('HMGET', head, 'chunk', 'revision')
if present[1] ~= ARGV[5] or present[2] ~= ARGV[4] then return {'HEAD', present[1], present[2]} end
if blobs_missing(13) then return {'BLOBS'} end
local replaced = snapshot ~= '' and snapshot_blobs(after) or {}

-- new names before old ones, so that a blob both have stays
for i = 13, #ARGV do retain(ARGV[i]) end
for _, blob in ipairs(replaced) do release(blob.name) end
if chunk ~= '' then redis.call('HSET', chunks, after, chunk) end
if snapshot ~= '' then redis.call('HSET', snapshots, after, snapshot) end
if key ~= '' then redis.call('HSET', requests, key, ARGV[12]) end
redis.call('HSET', head, 'chunk', after, 'cursor', ARGV[7])
prolong()
return {'OK'}
