-- ARGV 2 '1': only when its time is up. Returns whether there was a session to drop.
if redis.call('EXISTS', session, head) == 0 or (ARGV[2] == '1') ~= (is_over() or false) then return {'OK', 0} end
redis.call('UNLINK', session, head, requests)
redis.call('HDEL', family, string.match(session, '[^:]+$'))
return {'OK', 1}
