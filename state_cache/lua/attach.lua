-- ARGV 2 token, 3 nonce, 4 revision, 5 chunk, 6 branch, 7 snapshot record, 8… blobs that it names
if not is_there() then return {'NOT_FOUND'} end
if is_fenced(ARGV[2], ARGV[3]) then return {'FENCED'} end
local present = redis.call('HMGET', head, 'chunk', 'revision', 'base')
local index = tonumber(ARGV[5])
if present[2] ~= ARGV[4] or index < tonumber(present[3]) or index > tonumber(present[1]) then
  return {'HEAD', present[1], present[2]}
end
if blobs_missing(8) then return {'BLOBS'} end
name_blobs(8)
redis.call('HSET', base .. 'n:' .. ARGV[6], ARGV[5], ARGV[7])
redis.call('SADD', branches, ARGV[6])
return {'OK'}
