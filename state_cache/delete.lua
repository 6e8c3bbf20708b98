if redis.call('EXISTS', session) == 0 then return {'NOT_FOUND'} end
for _, name in ipairs(redis.call('HKEYS', held)) do leave(name) end
redis.call('UNLINK', session, head, chunks, snapshots, requests, held)
return {'OK'}
