-- ARGV 2 token, 3 nonce, 4 revision, 5 expected head, 6 head afterwards, 7 cursor, 8 branch, 9 chunk record,
-- 10 idempotency key, 11 request fingerprint, 12 request record, 13… blobs that are named; '' stands for none
local after, branch, chunk, key = ARGV[6], ARGV[8], ARGV[9], ARGV[10]

if not is_there() then return {'NOT_FOUND'} end
local refusal = request_refusal(key, ARGV[11])
if refusal then return refusal end
if is_fenced(ARGV[2], ARGV[3]) then return {'FENCED'} end
refusal = head_refusal(ARGV[4], ARGV[5])
if refusal then return refusal end
if blobs_missing(13) then return {'BLOBS'} end

name_blobs(13)
if chunk ~= '' then
  redis.call('HSET', base .. 'c:' .. branch, after, chunk)
  redis.call('SADD', branches, branch)
end
if key ~= '' then redis.call('HSET', requests, key, ARGV[12]) end
redis.call('HSET', head, 'chunk', after, 'cursor', ARGV[7])
prolong()
return {'OK'}
