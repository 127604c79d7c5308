-- A step of the sweep: the caller's version of this program is in use; which others are no longer.
--
-- ARGV[1]  library: the name of the caller's
-- Calls    integer, whole
-- Result   {'ok', gone}: libraries that no coordinator has announced for long
--
-- A version announces the schemas of the books that it reads. The books take a newer one when all
-- that are in use read it, so that no coordinator meets records that it cannot read. It has to have
-- been announced for some sweeps then: others may just not have come round.

local own = redis.call('HGET', KEY.libraries, ARGV[1])
local first_us = whole(own and string.match(own, '^(%d+) ')) or now_us
redis.call('HSET', KEY.libraries, ARGV[1], table.concat(
  {integer(first_us), integer(now_us), CONST.min_schema, CONST.max_schema}, ' '))
local announced, gone, newest = redis.call('HGETALL', KEY.libraries), {}, CONST.max_schema
for index = 1, #announced, 2 do
  local seen_us, max_schema = string.match(announced[index + 1], '^%d+ (%d+) %d+ (%d+)$')
  seen_us, max_schema = whole(seen_us), whole(max_schema)
  if not seen_us or not max_schema or now_us - seen_us > CONST.library_retention_us then
    gone[#gone + 1] = announced[index]
    redis.call('HDEL', KEY.libraries, announced[index])
  else
    newest = math.min(newest, max_schema)
  end
end
if newest > schema and now_us - first_us > CONST.library_settling_us then
  redis.call('HSET', KEYS[1], 'schema', integer(newest))
end
return {'ok', gone}
