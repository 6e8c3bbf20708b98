-- KEYS 8 session and 9 head of the parent
-- ARGV 2 session record, 3 cursor, 4 owner, 5 time to live in ms, 6 path, 7 last shared chunk, 8 revision of the parent,
-- 9 parent record, 10… blobs that are named
if redis.call('EXISTS', session) == 1 then return {'EXISTS'} end
local expires = redis.call('HGET', KEYS[9], 'expires')
if redis.call('EXISTS', KEYS[8]) == 0 or expires and tonumber(expires) <= milliseconds() then return {'NOT_FOUND'} end
local present = redis.call('HMGET', KEYS[9], 'chunk', 'revision', 'horizon')
if present[2] ~= ARGV[8] or tonumber(present[1]) < tonumber(ARGV[7]) or tonumber(present[3]) > ARGV[7] + 1 then return {'HEAD', present[1], present[2]} end
if blobs_missing(10) then return {'BLOBS'} end
name_blobs(10)
begin(ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[7], ARGV[6], present[3], ARGV[9])
return {'OK'}
