-- Counts and names of the books as a whole.
--
-- Result   {'ok', books_id, booked leases, {state, count, ...}, open reclaims}; leases that no
--           state counts are in the initial one
-- @flags no-writes

local open = redis.call('ZCARD', KEY.reclaims) - redis.call('ZCARD', KEY.ended_reclaims)
local booked = 0
for _, producer_id in ipairs(redis.call('ZRANGE', KEY.producers, 0, -1)) do
  booked = booked + redis.call('ZCARD', KEY.producer_leases .. producer_id)
end
return {'ok', books_id, booked, redis.call('HGETALL', KEY.lease_counts), open}
