-- the books of a lineage without sessions
if redis.call('EXISTS', family, named) == 0 then redis.call('UNLINK', epoch, named, branches) end
return {'OK'}
