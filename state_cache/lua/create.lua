-- ARGV 2 session record, 3 cursor, 4 owner, 5 time to live in ms ('' for ever), 6 empty path, 7… blobs that are named
if redis.call('EXISTS', session) == 1 then return {'EXISTS'} end
if blobs_missing(7) then return {'BLOBS'} end
name_blobs(7)
begin(ARGV[2], ARGV[3], ARGV[4], ARGV[5], '-1', ARGV[6], '0', '')
return {'OK'}
