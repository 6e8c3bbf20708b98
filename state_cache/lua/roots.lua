-- a new epoch, and every session of the lineage at one moment: id, record, chunk, revision, cursor, base, path, horizon
local found = {}
local now = redis.call('INCR', epoch)
for _, id in ipairs(redis.call('HKEYS', family)) do
  local record = redis.call('GET', base .. 's:' .. id)
  if record or redis.call('EXISTS', base .. 'h:' .. id) == 1 then
    local fields = redis.call('HMGET', base .. 'h:' .. id, 'chunk', 'revision', 'cursor', 'base', 'path', 'horizon')
    found[#found + 1] = {id, record, unpack(fields)}
  end
end
return {'OK', now, redis.call('SMEMBERS', branches), found}
