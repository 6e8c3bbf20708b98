-- ARGV 2 token, 3 nonce, 4 revision, 5 expected head, 6 last chunk kept, 7 cursor, 8 path, 9 rewinds,
-- 10 idempotency key, 11 request fingerprint, 12 request record, 13… blobs that are named; '' stands for none
local kept, key = ARGV[6], ARGV[10]

if not is_there() then return {'NOT_FOUND'} end
local refusal = request_refusal(key, ARGV[11])
if refusal then return refusal end
if is_fenced(ARGV[2], ARGV[3]) then return {'FENCED'} end
refusal = head_refusal(ARGV[4], ARGV[5])
if refusal then return refusal end
if tonumber(redis.call('HGET', head, 'horizon')) > kept + 1 then return {'HEAD', ARGV[5], ARGV[4]} end
if blobs_missing(13) then return {'BLOBS'} end

name_blobs(13)
if key ~= '' then redis.call('HSET', requests, key, ARGV[12]) end
redis.call('HSET', head, 'chunk', kept, 'base', kept + 1, 'path', ARGV[8], 'rewinds', ARGV[9], 'cursor', ARGV[7])
redis.call('HINCRBY', head, 'revision', 1)
prolong()
return {'OK'}
