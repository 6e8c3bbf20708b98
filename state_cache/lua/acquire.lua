-- ARGV 2 holder, 3 its address, 4 lease in ms, 5 token and 6 nonce of a fence ('' for none), 7 fresh nonce
-- returns token, nonce, and whether somebody else let the lease lapse
if not is_there() then return {'NOT_FOUND'} end
local present = redis.call('HMGET', head, 'token', 'nonce', 'lease', 'holder', 'address')
local now, lease, other = milliseconds(), tonumber(present[3] or '0'), present[4] ~= ARGV[2]
if other and lease > now then return {'HELD', lease - now, present[5]} end
redis.call('HSET', head, 'lease', now + ARGV[4], 'holder', ARGV[2], 'address', ARGV[3])
prolong()
if present[1] == ARGV[5] and present[2] == ARGV[6] then return {'OK', ARGV[5], ARGV[6], 0} end
redis.call('HSET', head, 'nonce', ARGV[7])
return {'OK', tostring(redis.call('HINCRBY', head, 'token', 1)), ARGV[7], other and lease > 0 and 1 or 0}
