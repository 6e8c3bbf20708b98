-- ARGV 2 token, 3 nonce, 4 lease from now on in ms, 0 gives it up
if not is_there() then return {'NOT_FOUND'} end
if is_fenced(ARGV[2], ARGV[3]) then return {'FENCED'} end
redis.call('HSET', head, 'lease', ARGV[4] == '0' and '0' or milliseconds() + ARGV[4])
if ARGV[4] ~= '0' then prolong() end
return {'OK'}
