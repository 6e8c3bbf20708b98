-- ARGV 2 session record, 3 cursor, 4 owner, 5 time to live in ms ('' for ever), 6… blobs that the session record names
if redis.call('EXISTS', session) == 1 then return {'EXISTS'} end
if blobs_missing(6) then return {'BLOBS'} end
for i = 6, #ARGV do retain(ARGV[i]) end
redis.call('SET', session, ARGV[2])
redis.call('HSET', head, 'chunk', '-1', 'revision', '0', 'cursor', ARGV[3], 'owner', ARGV[4])
if ARGV[5] ~= '' then redis.call('HSET', head, 'ttl', ARGV[5]) end
prolong()
return {'OK'}
