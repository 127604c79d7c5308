-- One step of the sweep: the listing lets go of reclaims whose records have expired.
--
-- ARGV[1]  limit: how many at most
-- Calls    integer
-- Result   {'ok', forgotten}: how many

local horizon = integer(now_us - CONST.ended_retention_ms * 1000)
local names = redis.call('ZRANGEBYSCORE', KEY.ended_reclaims, '-inf', horizon,
  'LIMIT', 0, tonumber(ARGV[1]))
for _, name in ipairs(names) do
  redis.call('ZREM', KEY.ended_reclaims, name)
  redis.call('ZREM', KEY.reclaims, name)
end
return {'ok', #names}
