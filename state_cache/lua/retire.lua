-- ARGV 2 branch: forgotten once it holds nothing
local branch = ARGV[2]
if redis.call('EXISTS', base .. 'c:' .. branch, base .. 'n:' .. branch) == 0 then
  redis.call('SREM', branches, branch)
end
return {'OK'}
