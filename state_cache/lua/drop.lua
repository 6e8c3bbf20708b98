-- ARGV 2 epoch of the marking, 3 branch, 4… chunks whose snapshots nothing needed then. Returns how many went.
-- a later marking may have seen a horizon move to one of them: then only that one may drop anything
if redis.call('GET', epoch) ~= ARGV[2] then return {'OK', 0} end
return {'OK', redis.call('HDEL', base .. 'n:' .. ARGV[3], unpack(ARGV, 4))}
