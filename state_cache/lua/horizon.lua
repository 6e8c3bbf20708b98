-- ARGV 2 revision, 3 horizon, 4 branch of the snapshot in front of it, 5 epoch of the marking. Returns whether it moved.
if not is_there() then return {'NOT_FOUND'} end
local present = redis.call('HMGET', head, 'revision', 'horizon', 'chunk')
local horizon = tonumber(ARGV[3])
local moves = redis.call('GET', epoch) == ARGV[5] and present[1] == ARGV[2] and tonumber(present[2]) < horizon and tonumber(present[3]) >= horizon - 1
  and redis.call('HEXISTS', base .. 'n:' .. ARGV[4], horizon - 1) == 1
if moves then redis.call('HSET', head, 'horizon', ARGV[3]) end
return {'OK', moves and 1 or 0}
