-- ARGV 2 epoch of the marking, 3… blobs that nothing needed then; those named since stay, and all of them once there
-- is a later marking. Returns how many went.
if redis.call('GET', epoch) ~= ARGV[2] then return {'OK', 0} end
local freed = 0
for i = 3, #ARGV do
  local last = redis.call('ZSCORE', named, ARGV[i])
  if last and tonumber(last) < tonumber(ARGV[2]) then
    redis.call('ZREM', named, ARGV[i])
    redis.call('UNLINK', base .. 'b:' .. ARGV[i])
    freed = freed + 1
  end
end
return {'OK', freed}
