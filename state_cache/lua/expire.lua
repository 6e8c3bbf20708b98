-- ARGV 2 branch, 3… chunk and the record that stays of it, in turn
for i = 3, #ARGV, 2 do
  if redis.call('HEXISTS', base .. 'c:' .. ARGV[2], ARGV[i]) == 1 then
    redis.call('HSET', base .. 'c:' .. ARGV[2], ARGV[i], ARGV[i + 1])
  end
end
return {'OK'}
