-- ARGV 2 fresh nonce
if not is_there() then return {'NOT_FOUND'} end
redis.call('HSET', head, 'nonce', ARGV[2])
prolong()
return {'OK', redis.call('HINCRBY', head, 'token', 1)}
