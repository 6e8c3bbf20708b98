if not is_there() then return {'NOT_FOUND'} end
drop()
return {'OK'}
