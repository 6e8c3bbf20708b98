-- ARGV 2 session record, 3 cursor, 4… blobs that the session record names
if redis.call('EXISTS', session) == 1 then return {'EXISTS'} end
if blobs_missing(4) then return {'BLOBS'} end
for i = 4, #ARGV do retain(ARGV[i]) end
redis.call('SET', session, ARGV[2])
redis.call('HSET', head, 'chunk', '-1', 'revision', '0', 'cursor', ARGV[3])
return {'OK'}
