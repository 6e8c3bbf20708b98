-- ARGV 2 token, 3 nonce, 4 how many of the newest snapshots stay
if not is_there() then return {'NOT_FOUND'} end
if is_fenced(ARGV[2], ARGV[3]) then return {'FENCED'} end
local indices = redis.call('HKEYS', snapshots)
table.sort(indices, function(a, b) return tonumber(a) > tonumber(b) end)
for i = tonumber(ARGV[4]) + 1, #indices do
  for _, blob in ipairs(snapshot_blobs(indices[i])) do release(blob.name) end
  redis.call('HDEL', snapshots, indices[i])
end
return {'OK'}
