-- ARGV 2 fresh nonce
if redis.call('EXISTS', session) == 0 then return {'NOT_FOUND'} end
redis.call('HSET', head, 'nonce', ARGV[2])
return {'OK', redis.call('HINCRBY', head, 'token', 1)}
