-- One step of the sweep: leases past their deadline expire.
--
-- ARGV[1]  limit: how many leases at most
-- Calls    integer, lease_of, step, save
-- Result   {'ok', expired}: how many

local overdue = redis.call('ZRANGEBYSCORE', KEY.deadlines, '-inf', integer(clock_us),
  'LIMIT', 0, tonumber(ARGV[1]))
for _, lease_id in ipairs(overdue) do
  local lease = lease_of(lease_id)
  local expired = step(lease, EVENT.expire, 'expired')
  assert(expired, 'a deadline on a lease that is ' .. lease.state)
  save(lease)
end
return {'ok', #overdue}
