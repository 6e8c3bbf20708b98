-- returns whether there was a session whose time is up
if redis.call('EXISTS', session) == 0 or not is_over() then return {'OK', 0} end
drop()
return {'OK', 1}
